// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"context"
	"fmt"
	"net/netip"
	"strconv"

	"github.com/spf13/cobra"
	"google.golang.org/grpc"

	weftv1 "github.com/weft-mesh/weft/api/weft/v1"
)

func newDenyCommand(s IO) *cobra.Command {
	cmd := &cobra.Command{
		Use:   "deny",
		Short: "Drop everything that networks send to this node",
		Long: `Drop everything that networks send to this node, as it arrives on the uplink and
before anything else looks at it. The list is the node's own, and stays while its agent is
down or starts anew.`,
		Args: cobra.NoArgs,
	}
	cmd.AddCommand(newDenyAddCommand(s), newDenyDelCommand(s), newDenyListCommand(s))
	return cmd
}

func newDenyAddCommand(s IO) *cobra.Command {
	return denyChange(s, &cobra.Command{
		Use:   "add CIDR...",
		Short: "Drop what these networks send; addresses of the cluster are refused",
		Example: `  weft deny add 198.51.100.0/24
  weft deny add 203.0.113.9 2001:db8:bad::/48`,
	}, "added", weftv1.NodeClient.AddDenied)
}

func newDenyDelCommand(s IO) *cobra.Command {
	return denyChange(s, &cobra.Command{
		Use:     "del CIDR...",
		Short:   "Let these networks in again",
		Example: `  weft deny del 198.51.100.0/24`,
	}, "deleted", weftv1.NodeClient.DeleteDenied)
}

// denyChange completes a command that changes the list.
func denyChange(s IO, cmd *cobra.Command, done string, call func(weftv1.NodeClient, context.Context, *weftv1.DeniedRequest, ...grpc.CallOption) (*weftv1.DeniedResponse, error)) *cobra.Command {
	var agent agentFlag
	cmd.Args = cobra.MinimumNArgs(1)
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		for _, a := range args {
			if err := checkCIDR(a); err != nil {
				return err
			}
		}
		return agent.call(cmd.Context(), func(c weftv1.NodeClient) error {
			r, err := call(c, cmd.Context(), &weftv1.DeniedRequest{Cidrs: args})
			if err != nil {
				return err
			}
			_, err = fmt.Fprintf(s.Out, "%s %s\n", done, plural(uint64(r.Changed), "network"))
			return err
		})
	}
	agent.register(cmd)
	return cmd
}

func checkCIDR(s string) error {
	if _, err := netip.ParseAddr(s); err == nil {
		return nil
	}
	if _, err := netip.ParsePrefix(s); err != nil {
		return fmt.Errorf("network %q: want a CIDR such as 198.51.100.0/24, or an address", s)
	}
	return nil
}

// deniedJSON is what "deny list -o json" prints.
type deniedJSON struct {
	Where      string              `json:"where"`
	MaxEntries uint64              `json:"maxEntries"`
	Networks   []deniedNetworkJSON `json:"networks"`
}

type deniedNetworkJSON struct {
	CIDR    string `json:"cidr"`
	Packets uint64 `json:"packets"` // that were dropped
	Bytes   uint64 `json:"bytes"`
	Problem string `json:"problem,omitempty"`
}

func newDenyListCommand(s IO) *cobra.Command {
	return askCommand(s, &cobra.Command{
		Use:     "list",
		Short:   "List the networks, and what was dropped of each",
		Example: `  weft deny list -o json | jq '.networks[] | select(.packets > 0)'`,
		Args:    cobra.NoArgs,
	}, func(ctx context.Context, c weftv1.NodeClient, _ []string) (any, func() error, error) {
		r, err := c.ListDenied(ctx, &weftv1.ListDeniedRequest{})
		if err != nil {
			return nil, nil, err
		}
		list := &deniedJSON{Where: r.Where, MaxEntries: r.MaxEntries, Networks: each(r.Networks, func(n *weftv1.DeniedNetwork) deniedNetworkJSON {
			return deniedNetworkJSON{CIDR: n.Cidr, Packets: n.Packets, Bytes: n.Bytes, Problem: n.Problem}
		})}
		return list, func() error { return printDenied(s, list) }, nil
	})
}

func printDenied(s IO, list *deniedJSON) error {
	p := printer{w: s.Out}
	p.line("%d of %d networks, dropped by %s.", len(list.Networks), list.MaxEntries, list.Where)
	if len(list.Networks) == 0 {
		return p.err
	}
	p.line("")
	p.table([]string{"NETWORK", "PACKETS", "BYTES", "PROBLEM"}, each(list.Networks, func(n deniedNetworkJSON) []string {
		return []string{n.CIDR, strconv.FormatUint(n.Packets, 10), strconv.FormatUint(n.Bytes, 10), n.Problem}
	}))
	return p.err
}
