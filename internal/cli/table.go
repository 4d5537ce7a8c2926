// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"encoding/json"
	"errors"

	"github.com/spf13/cobra"

	weftv1 "github.com/weft-mesh/weft/api/weft/v1"
	"github.com/weft-mesh/weft/internal/state"
)

func newTableCommand(s IO) *cobra.Command {
	cmd := &cobra.Command{
		Use:   "table",
		Short: "Look into the agent's tables",
		Args:  cobra.NoArgs,
	}
	cmd.AddCommand(newTableListCommand(s))
	return cmd
}

func newTableListCommand(s IO) *cobra.Command {
	var agent agentFlag
	var output outputFlag
	cmd := &cobra.Command{
		Use:   "list NAME",
		Short: "Print the rows of a table",
		Long: `Print the rows of a table: what the agent knows from the manifest folder or
Kubernetes and from the CNI plugin. All rows are of the same moment.`,
		Example: `  weft table list workload
  weft table list pod -o json | jq -r '.[].ips[]'
  weft table list source-error`,
		Args:              cobra.ExactArgs(1),
		ValidArgsFunction: completeTables,
		RunE: func(cmd *cobra.Command, args []string) error {
			if err := output.check(); err != nil {
				return err
			}
			return agent.call(cmd.Context(), func(c weftv1.NodeClient) error {
				list, err := c.ListTable(cmd.Context(), &weftv1.ListTableRequest{Name: args[0]})
				if err != nil {
					return err
				}
				if output.json() {
					return printJSON(s.Out, each(list.Rows, func(r *weftv1.TableRow) json.RawMessage { return r.Json }))
				}
				return printTable(s.Out, list.Header, each(list.Rows, (*weftv1.TableRow).GetCells))
			})
		},
	}
	agent.register(cmd)
	output.register(cmd, "table, or json (a list of objects)")
	return cmd
}

func completeTables(_ *cobra.Command, args []string, _ string) ([]string, cobra.ShellCompDirective) {
	if len(args) > 0 {
		return nil, cobra.ShellCompDirectiveNoFileComp
	}
	return tableNames(), cobra.ShellCompDirectiveNoFileComp
}

// tableNames are the names that ListTable knows.
func tableNames() []string {
	tables, err := state.New()
	if err != nil {
		return nil
	}
	_, err = tables.List("")
	var none *state.ErrNoTable
	if errors.As(err, &none) {
		return none.Known
	}
	return nil
}
