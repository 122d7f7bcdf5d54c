package main

import (
	"fmt"
	"runtime"

	"github.com/spf13/cobra"

	"github.com/shapectl/shapectl/internal/report"
	"github.com/shapectl/shapectl/pkg/maps"
)

func (e *env) versionCommand() *cobra.Command {
	return &cobra.Command{
		Use:   "version",
		Short: "Show which shapectl this is",
		Args:  args(0, 0),
		RunE: func(*cobra.Command, []string) error {
			number, err := maps.Layout()
			if err != nil {
				return err
			}
			layout := fmt.Sprintf("%016x", number)
			if e.json {
				return report.JSON(e.out, []any{struct {
					Version string `json:"version"`
					Layout  string `json:"layout"`
					Go      string `json:"go"`
				}{version, layout, runtime.Version()}})
			}
			_, err = fmt.Fprintf(e.out, "shapectl %s (pins of layout %s, %s)\n", version, layout, runtime.Version())
			return err
		},
	}
}
