// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"encoding/json"
	"fmt"
	"io"
	"slices"
	"strings"
	"unicode/utf8"

	"github.com/spf13/cobra"
)

// The formats of -o.
const (
	outputTable = "table"
	outputJSON  = "json"
)

// outputFlag is -o.
type outputFlag struct{ format string }

func (o *outputFlag) register(cmd *cobra.Command, usage string) {
	cmd.Flags().StringVarP(&o.format, "output", "o", outputTable, usage)
	complete(cmd, "output", outputTable, outputJSON)
}

func (o *outputFlag) check() error {
	if o.format != outputTable && o.format != outputJSON {
		return fmt.Errorf("output %q: want %s or %s", o.format, outputTable, outputJSON)
	}
	return nil
}

func (o *outputFlag) json() bool { return o.format == outputJSON }

// complete offers values for a flag of cmd to the shell.
func complete(cmd *cobra.Command, flag string, values ...string) {
	// The only error is a flag that is not there: a mistake in this package.
	if err := cmd.RegisterFlagCompletionFunc(flag, cobra.FixedCompletions(slices.Clone(values), cobra.ShellCompDirectiveNoFileComp)); err != nil {
		panic(err)
	}
}

// printJSON writes v, indented, with a newline.
func printJSON(w io.Writer, v any) error {
	e := json.NewEncoder(w)
	e.SetIndent("", "  ")
	e.SetEscapeHTML(false)
	return e.Encode(v)
}

// columns writes rows with aligned columns. Widths grow as rows come, so it
// does for endless output as well. The zero value is ready.
type columns struct{ widths []int }

// fit makes the columns wide enough for row.
func (c *columns) fit(row []string) {
	for i, cell := range row {
		if i == len(c.widths) {
			c.widths = append(c.widths, 0)
		}
		c.widths[i] = max(c.widths[i], utf8.RuneCountInString(cell))
	}
}

// write writes one row, two spaces between the columns.
func (c *columns) write(w io.Writer, row []string) error {
	c.fit(row)
	var b strings.Builder
	for i, cell := range row {
		if i > 0 {
			b.WriteString("  ")
		}
		b.WriteString(cell)
		b.WriteString(strings.Repeat(" ", c.widths[i]-utf8.RuneCountInString(cell)))
	}
	_, err := fmt.Fprintln(w, strings.TrimRight(b.String(), " "))
	return err
}

// printTable writes a header and rows.
func printTable(w io.Writer, header []string, rows [][]string) error {
	var c columns
	c.fit(header)
	for _, r := range rows {
		c.fit(r)
	}
	for _, r := range append([][]string{header}, rows...) {
		if err := c.write(w, r); err != nil {
			return err
		}
	}
	return nil
}
