// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"context"
	"fmt"
	"slices"
	"strings"

	"github.com/spf13/cobra"

	weftv1 "github.com/weft-mesh/weft/api/weft/v1"
)

// podPolicyJSON is what "policy show -o json" prints.
type podPolicyJSON struct {
	Namespace string            `json:"namespace"`
	Name      string            `json:"name"`
	IPs       []string          `json:"ips"`
	Identity  uint64            `json:"identity"`
	Policies  []string          `json:"policies"`
	Egress    bool              `json:"egress"` // whether any policy judges it
	Ingress   bool              `json:"ingress"`
	Entries   []policyEntryJSON `json:"entries"`
}

type policyEntryJSON struct {
	Direction string         `json:"direction"`
	Peer      policyPeerJSON `json:"peer"`
	Protocol  string         `json:"protocol"`
	Ports     []string       `json:"ports"` // none: any
	Except    []string       `json:"except,omitempty"`
	Verdict   string         `json:"verdict"`
	Tier      string         `json:"tier"`
	Rule      string         `json:"rule"`
}

type policyPeerJSON struct {
	Kind           string            `json:"kind"`
	Identity       uint64            `json:"identity,omitempty"`
	Namespace      string            `json:"namespace,omitempty"`
	ServiceAccount string            `json:"serviceAccount,omitempty"`
	Labels         map[string]string `json:"labels,omitempty"`
	Pods           []string          `json:"pods,omitempty"`
	CIDR           string            `json:"cidr,omitempty"`
	Without        []string          `json:"without,omitempty"`
}

func newPolicyShowCommand(s IO) *cobra.Command {
	return askCommand(s, &cobra.Command{
		Use:   "show NS/POD",
		Short: "Show what is in force for a pod of this node, and from which rule",
		Long: `Show what is in force for a pod of this node, and from which rule. For a new
connection the first line that matches decides; where that says "pass", the first
behind it whose tier is not admin. What answers an allowed connection is allowed.`,
		Example: `  weft policy show shop/web-0
  weft policy show shop/web-0 -o json | jq '.entries[] | select(.verdict == "deny")'`,
		Args: cobra.ExactArgs(1),
	}, func(ctx context.Context, c weftv1.NodeClient, args []string) (any, func() error, error) {
		r, err := c.ShowPolicy(ctx, &weftv1.ShowPolicyRequest{Pod: args[0]})
		if err != nil {
			return nil, nil, err
		}
		p := toPodPolicy(r)
		return p, func() error { return printPodPolicy(s, p) }, nil
	})
}

func toPodPolicy(r *weftv1.ShowPolicyResponse) *podPolicyJSON {
	return &podPolicyJSON{
		Namespace: r.Namespace, Name: r.Name, IPs: append([]string{}, r.Ips...), Identity: r.Identity,
		Policies: append([]string{}, r.Policies...), Egress: r.Egress, Ingress: r.Ingress,
		Entries: each(r.Entries, func(e *weftv1.PolicyEntry) policyEntryJSON {
			p := e.GetPeer()
			return policyEntryJSON{
				Direction: e.Direction, Protocol: e.Protocol, Ports: append([]string{}, e.Ports...), Except: e.Except,
				Verdict: e.Verdict, Tier: e.Tier, Rule: e.Rule,
				Peer: policyPeerJSON{
					Kind: p.GetKind(), Identity: p.GetIdentity(), Namespace: p.GetNamespace(), ServiceAccount: p.GetServiceAccount(),
					Labels: p.GetLabels(), Pods: p.GetPods(), CIDR: p.GetCidr(), Without: p.GetWithout(),
				},
			}
		}),
	}
}

func printPodPolicy(s IO, p *podPolicyJSON) error {
	name := p.Namespace + "/" + p.Name
	if len(p.Policies) == 0 {
		_, err := fmt.Fprintf(s.Out, "No policy selects %s: everything is allowed.\n", name)
		return err
	}
	if _, err := fmt.Fprintf(s.Out, "%s is selected by %s.\n", name, strings.Join(p.Policies, ", ")); err != nil {
		return err
	}
	judged := map[string]bool{"egress": p.Egress, "ingress": p.Ingress}
	var rows [][]string
	for _, d := range []string{"egress", "ingress"} {
		if !judged[d] {
			if _, err := fmt.Fprintf(s.Out, "No policy judges its %s: all of it is allowed.\n", d); err != nil {
				return err
			}
		}
	}
	for _, e := range p.Entries {
		if judged[e.Direction] {
			rows = append(rows, []string{e.Direction, peerText(e.Peer), portsText(e), e.Verdict, e.Tier, e.Rule})
		}
	}
	if _, err := fmt.Fprintln(s.Out); err != nil {
		return err
	}
	return printTable(s.Out, []string{"DIRECTION", "PEER", "PORTS", "VERDICT", "TIER", "RULE"}, rows)
}

func portsText(e policyEntryJSON) string {
	text := "any"
	switch {
	case len(e.Ports) > 0:
		text = strings.Join(e.Ports, ",") + "/" + e.Protocol
	case e.Protocol != "any":
		text = "any/" + e.Protocol
	}
	if len(e.Except) > 0 {
		text += " but " + strings.Join(e.Except, ",")
	}
	return text
}

func peerText(p policyPeerJSON) string {
	switch p.Kind {
	case "pods":
		var labels []string
		for k, v := range p.Labels {
			labels = append(labels, k+"="+v)
		}
		slices.Sort(labels)
		text := p.Namespace + "/{" + strings.Join(labels, ",") + "}"
		if len(p.Pods) > 0 {
			text += " (" + some(p.Pods, 2) + ")"
		}
		return text
	case "cidr":
		if len(p.Without) > 0 {
			return p.CIDR + " without " + some(p.Without, 3)
		}
		return p.CIDR
	case "node":
		return "its own node"
	}
	return p.Kind
}
