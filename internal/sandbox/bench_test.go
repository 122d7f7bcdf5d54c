package sandbox

import (
	"encoding/json"
	"testing"
)

// The largest loads. A request must stay well below the patience of a visitor who drags a slider.
func BenchmarkLargest(b *testing.B) {
	hour := uint64(3600 * second)
	many := func(kind string) (senders []Sender) {
		for range MaxSenders {
			senders = append(senders, Sender{
				Kind: kind, Bytes: 1514, Packets: MaxPackets, PacketsPerSecond: 1e6, DurationNS: hour, OnNS: second / 1000, OffNS: second / 1000, RTTNS: 1000, ECN: true,
			})
		}
		return senders
	}
	for name, r := range map[string]Request{
		"tcp":    {Limit: map[string]string{"rate": "1gbit"}, Senders: many("tcp")},
		"delay":  {Limit: map[string]string{"rate": "8kbit", "each": "host"}, Senders: many("tcp-delay")},
		"shares": {Limit: map[string]string{"rate": "100mbit", "share": "flow", "order": "sparse-first"}, Senders: many("random")},
		"burst":  {Limit: map[string]string{"rate": "1gbit", "excess": "ecn", "order": "sparse-first"}, Senders: many("burst")},
		"all":    {Limit: map[string]string{"rate": "1gbit"}, Senders: many("on-off")},
	} {
		b.Run(name, func(b *testing.B) {
			for b.Loop() {
				result, err := Run(r)
				if err != nil {
					b.Fatal(err)
				}
				text, err := json.Marshal(result)
				if err != nil {
					b.Fatal(err)
				}
				b.ReportMetric(float64(len(text)), "B/answer")
			}
		})
	}
}
