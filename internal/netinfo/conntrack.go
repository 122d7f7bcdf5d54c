package netinfo

import (
	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"
)

// LoadConntrack has the kernel load its connection tracking, by asking for statistics. Whether that succeeds shows when programs
// call it: at boot, they may be loaded before the firewall.
func LoadConntrack() {
	const getStats = 5 // IPCTNL_MSG_CT_GET_STATS
	r := nl.NewNetlinkRequest(unix.NFNL_SUBSYS_CTNETLINK<<8|getStats, unix.NLM_F_ACK)
	r.AddData(&nl.Nfgenmsg{})
	r.Execute(unix.NETLINK_NETFILTER, 0)
}
