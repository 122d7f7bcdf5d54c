// Command shapectl limits network traffic. Each command opens the state that is
// pinned in a bpffs, does one thing, and ends. The kernel enforces the limits.
package main

import (
	"fmt"
	"os"
	"runtime"
	"runtime/debug"

	"github.com/spf13/cobra"

	"github.com/shapectl/shapectl/internal/report"
	"github.com/shapectl/shapectl/pkg/maps"
)

// version is set by the Makefile.
var version = "dev"

func main() {
	debug.SetGCPercent(200) // most commands end soon
	e := &env{in: os.Stdin, out: os.Stdout, err: os.Stderr, getenv: os.Getenv, boots: "/etc/shapectl/policy.yaml"}
	os.Exit(e.run(os.Args[1:]))
}

func versionCommand(e *env) *cobra.Command {
	return &cobra.Command{
		Use:   "version",
		Short: "Show the version",
		Args:  args(0, 0),
		RunE: func(*cobra.Command, []string) error {
			layout := fmt.Sprintf("%016x", maps.Layout())
			if e.json {
				return report.JSON(e.out, []any{struct {
					Version string `json:"version"`
					Layout  string `json:"layout"`
					Go      string `json:"go"`
				}{version, layout, runtime.Version()}})
			}
			_, err := fmt.Fprintf(e.out, "shapectl %s (pins of layout %s, %s)\n", version, layout, runtime.Version())
			return err
		},
	}
}
