// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"fmt"
	"io"
	"strings"

	"github.com/spf13/cobra"

	"github.com/weft-mesh/weft/internal/datapath/probe"
)

func newCheckCommand(s IO, run func() (*probe.Report, error)) *cobra.Command {
	var output outputFlag
	cmd := &cobra.Command{
		Use:   "check",
		Short: "Check what this kernel can do and what weft makes of it",
		Long: `Check what this kernel can do, feature by feature, by trying: small programs are
loaded and attached to throw-away devices and cgroups, and removed again. What
is missing comes with the kernel version that has it, and with what weft does
instead.

It needs root. The exit code is 1 if something is missing that weft cannot do
without.`,
		Example: `  weft check
  weft check -o json | jq -r '.features[] | select(.status != "yes") | .feature'`,
		Args: cobra.NoArgs,
		RunE: func(*cobra.Command, []string) error {
			if err := output.check(); err != nil {
				return err
			}
			report, err := run()
			if err != nil {
				return err
			}
			print := printCheck
			if output.json() {
				print = func(w io.Writer, r *probe.Report) error { return printJSON(w, r) }
			}
			if err := print(s.Out, report); err != nil {
				return err
			}
			return missingRequired(report)
		},
	}
	output.register(cmd, "table, or json")
	return cmd
}

func printCheck(w io.Writer, r *probe.Report) error {
	if _, err := fmt.Fprintf(w, "Kernel %s\n", r.Kernel); err != nil {
		return err
	}
	var c columns
	rows := each(r.Features, checkRow)
	header := []string{"HERE", "FEATURE", "NEEDED", "LINUX HAS IT SINCE", "WHAT WEFT DOES"}
	c.fit(header)
	for _, row := range rows {
		c.fit(row[:len(header)-1])
	}
	group := ""
	for i, f := range r.Features {
		if f.Group != group {
			group = f.Group
			if _, err := fmt.Fprintf(w, "\n%s\n", capital(group)); err != nil {
				return err
			}
			if err := c.write(w, header); err != nil {
				return err
			}
		}
		if err := c.write(w, rows[i]); err != nil {
			return err
		}
	}
	return nil
}

func checkRow(f probe.Result) []string {
	needed, since, effect := "", "", f.Effect
	if f.Required {
		needed = "always"
	}
	if f.Status != probe.Available {
		since = strings.TrimSpace(f.Since + " " + f.Option)
	}
	if f.Status == probe.Unknown || f.Required && f.Error != "" {
		effect += " (" + f.Error + ")"
	}
	return []string{string(f.Status), f.Feature, needed, since, effect}
}

func capital(s string) string {
	if s == "" {
		return s
	}
	return strings.ToUpper(s[:1]) + s[1:]
}

func missingRequired(r *probe.Report) error {
	var names []string
	for _, f := range r.Features {
		if f.Required && f.Status != probe.Available {
			names = append(names, fmt.Sprintf("%s (since Linux %s)", f.Feature, f.Since))
		}
	}
	if len(names) == 0 {
		return nil
	}
	return fmt.Errorf("this kernel cannot run weft, it lacks: %s", strings.Join(names, ", "))
}
