package doctor

import (
	"fmt"

	"github.com/shapectl/shapectl/internal/plain"
	"github.com/shapectl/shapectl/internal/report"
)

func checkKept(f Facts) []report.Finding {
	if len(f.Kept) == 0 {
		return nil
	}
	return systemFinding(report.Note, "leftovers",
		fmt.Sprintf("the last change left %s without a rule; the memory of these is kept for 'shapectl rollback': %s",
			plain.Count(len(f.Kept), "device direction"), plain.List(f.Kept)),
		"the next command that changes a rule frees it; so does 'shapectl watch' after an hour")
}

// checkLeft tells of what is pinned for other network namespaces.
func checkLeft(f Facts) (findings []report.Finding) {
	var dead, unmarked []string
	for _, l := range f.Left {
		switch {
		case !l.Dead:
			unmarked = append(unmarked, fmt.Sprintf("%q", l.Path))
		case len(l.InForce) == 0:
			dead = append(dead, fmt.Sprintf("%q", l.Path))
		}
		for _, o := range l.InForce {
			if o.Device.Name != "" {
				side := Side{Name: o.Device.Name, Direction: o.Direction}
				findings = append(findings, side.finding(report.Warning, "leftovers",
					"rules are in force that a network namespace set which no longer exists; the device had left it: they cannot be shown or changed",
					fmt.Sprintf("%s, then set them here", side.flush()))...)
				continue
			}
			findings = append(findings, systemFinding(report.Warning, "leftovers",
				fmt.Sprintf("%q: rules are in force on the %s of a device in another network namespace, set by one that no longer exists", l.Path, o.Direction),
				"'shapectl flush' that device in its namespace")...)
		}
	}
	if len(dead) > 0 {
		findings = append(findings, systemFinding(report.Note, "leftovers",
			fmt.Sprintf("pins of %s that no longer exist: %s", plain.Count(len(dead), "network namespace"), plain.List(dead)),
			"the next command that changes a rule removes them; so does 'shapectl watch'")...)
	}
	if len(unmarked) > 0 {
		findings = append(findings, systemFinding(report.Note, "leftovers",
			fmt.Sprintf("pins of %s that an older build made, so that it cannot be told whether they exist: %s",
				plain.Count(len(unmarked), "network namespace"), plain.List(unmarked)),
			"run 'shapectl watch' or change a rule in those that do; 'rm -r' removes the pins of the others")...)
	}
	return findings
}
