package sandbox
import ("testing";"time";"fmt";"encoding/json")
func TestTmp(t *testing.T){
 for _,p:=range Presets(){
  s:=time.Now(); r,err:=Run(p.Request); d:=time.Since(s)
  b,_:=json.Marshal(r)
  fmt.Println("==",p.Name,err,d,time.Since(s)-d,len(b)); fmt.Println(r.Says)
  for _,l:=range r.Limits{fmt.Println("  ",l.Name,l.Error,l.Says,"|",l.Command,l.NoCommand, l.Summary.OfferedBytes*8*1000000000/(1+l.UntilNS-l.FromNS), l.Summary.PassedBytes*8*1000000000/(1+l.UntilNS-l.FromNS))}
 }
}
