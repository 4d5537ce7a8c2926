// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"

	weftv1 "github.com/weft-mesh/weft/api/weft/v1"
)

func newPolicyCommand(s IO) *cobra.Command {
	cmd := &cobra.Command{
		Use:   "policy",
		Short: "Show which network policy is in force, and what it decides",
		Args:  cobra.NoArgs,
	}
	cmd.AddCommand(newPolicyListCommand(s), newPolicyStatusCommand(s), newPolicyShowCommand(s), newPolicyTraceCommand(s))
	return cmd
}

// askCommand gives a command what all of them have: ask gets a client and
// returns what to print, as JSON or by text.
func askCommand(s IO, cmd *cobra.Command, ask func(ctx context.Context, c weftv1.NodeClient, args []string) (value any, text func() error, err error)) *cobra.Command {
	var agent agentFlag
	var output outputFlag
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		if err := output.check(); err != nil {
			return err
		}
		return agent.call(cmd.Context(), func(c weftv1.NodeClient) error {
			value, text, err := ask(cmd.Context(), c, args)
			if value == nil {
				return err
			}
			if output.json() {
				return errors.Join(printJSON(s.Out, value), err)
			}
			return errors.Join(text(), err)
		})
	}
	agent.register(cmd)
	output.register(cmd, "table, or json")
	return cmd
}

// policyJSON is a policy in -o json; the names of its fields stay.
type policyJSON struct {
	Kind      string   `json:"kind"`
	Namespace string   `json:"namespace,omitempty"`
	Name      string   `json:"name"`
	Tier      string   `json:"tier"`
	Priority  int32    `json:"priority"`
	Pods      []string `json:"pods"`
	Problems  []string `json:"problems"`
}

func newPolicyListCommand(s IO) *cobra.Command {
	return askCommand(s, &cobra.Command{
		Use:   "list",
		Short: "List policies in the order of evaluation, and the pods of this node that each selects",
		Example: `  weft policy list
  weft policy list -o json | jq '.[] | select(.problems != [])'`,
		Args: cobra.NoArgs,
	}, func(ctx context.Context, c weftv1.NodeClient, _ []string) (any, func() error, error) {
		r, err := c.ListPolicies(ctx, &weftv1.ListPoliciesRequest{})
		if err != nil {
			return nil, nil, err
		}
		list := each(r.Policies, func(p *weftv1.PolicySummary) policyJSON {
			return policyJSON{
				Kind: p.Kind, Namespace: p.Namespace, Name: p.Name, Tier: p.Tier, Priority: p.Priority,
				Pods: append([]string{}, p.Pods...), Problems: append([]string{}, p.Problems...),
			}
		})
		return list, func() error {
			return printTable(s.Out, []string{"KIND", "NAMESPACE", "NAME", "TIER", "PODS", "PROBLEMS"}, each(list, policyRow))
		}, nil
	})
}

func policyRow(p policyJSON) []string {
	tier := p.Tier
	if p.Kind == "ClusterNetworkPolicy" {
		tier += " " + strconv.Itoa(int(p.Priority))
	}
	return []string{p.Kind, dash(p.Namespace), p.Name, tier, dash(some(p.Pods, 3)), strings.Join(p.Problems, "; ")}
}

// dash stands for what is empty.
func dash(s string) string {
	if s == "" {
		return "-"
	}
	return s
}

// some lists the first of many.
func some(names []string, most int) string {
	if len(names) <= most {
		return strings.Join(names, ",")
	}
	return fmt.Sprintf("%s and %d more", strings.Join(names[:most], ","), len(names)-most)
}

// policyStatusJSON is what "policy status -o json" prints.
type policyStatusJSON struct {
	Revision   uint64     `json:"revision"`
	Generation uint64     `json:"generation"`
	Changed    *time.Time `json:"changed"`
	InForce    bool       `json:"inForce"` // the last change
	Error      string     `json:"error,omitempty"`
	Policies   uint32     `json:"policies"`
	Subjects   uint32     `json:"subjects"`
	Pods       uint32     `json:"pods"`
	Entries    uint64     `json:"entries"`
	MaxEntries uint64     `json:"maxEntries"`
	Prefixes   uint64     `json:"prefixes"`
	Problems   []string   `json:"problems"`
}

func newPolicyStatusCommand(s IO) *cobra.Command {
	return askCommand(s, &cobra.Command{
		Use:   "status",
		Short: "Tell which change of policy is in force; exit code 1 where the last is not",
		Long: `Tell which change of policy is in force, and how much of the kernel's map it
takes. A change that cannot be put in force, because the map is full or the kernel
refuses it, leaves everything as it was: the error says why, and the exit code
is 1 until it is mended.`,
		Example: `  weft policy status
  weft policy status -o json | jq .generation`,
		Args: cobra.NoArgs,
	}, func(ctx context.Context, c weftv1.NodeClient, _ []string) (any, func() error, error) {
		r, err := c.PolicyStatus(ctx, &weftv1.PolicyStatusRequest{})
		if err != nil {
			return nil, nil, err
		}
		st := policyStatusJSON{
			Revision: r.Revision, Generation: r.Generation, Changed: toTime(r.Changed), InForce: r.Error == "", Error: r.Error,
			Policies: r.Policies, Subjects: r.Subjects, Pods: r.Pods, Entries: r.Entries, MaxEntries: r.MaxEntries,
			Prefixes: r.Prefixes, Problems: append([]string{}, r.Problems...),
		}
		if !st.InForce {
			err = errors.New("the last change of policy is not in force: " + st.Error)
		}
		return st, func() error { return printPolicyStatus(s, &st) }, err
	})
}

func printPolicyStatus(s IO, st *policyStatusJSON) error {
	since := "nothing is in force yet"
	if st.Changed != nil {
		since = fmt.Sprintf("revision %d of manifest generation %d, since %s", st.Revision, st.Generation, st.Changed.Format(time.RFC3339))
	}
	last := "yes"
	if !st.InForce {
		last = "NO: " + st.Error
	}
	full := fill(mapStatus{Entries: st.Entries, MaxEntries: st.MaxEntries})
	rows := [][]string{
		{"In force", since},
		{"Last change", last},
		{"Policies", fmt.Sprintf("%d, selecting %s of this node in %s", st.Policies, plural(uint64(st.Pods), "pod"), plural(uint64(st.Subjects), "group"))},
		{"Map", fmt.Sprintf("%d of %d entries (%s), %d prefixes", st.Entries, st.MaxEntries, full, st.Prefixes)},
	}
	var c columns
	for _, row := range rows {
		c.fit(row)
	}
	for _, row := range rows {
		if err := c.write(s.Out, row); err != nil {
			return err
		}
	}
	for _, p := range st.Problems {
		if _, err := fmt.Fprintln(s.Out, "Problem:", p); err != nil {
			return err
		}
	}
	return nil
}
