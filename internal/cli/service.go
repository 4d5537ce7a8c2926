// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"context"
	"fmt"
	"io"
	"net"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"

	weftv1 "github.com/weft-mesh/weft/api/weft/v1"
)

func newServiceCommand(s IO) *cobra.Command {
	cmd := &cobra.Command{
		Use:   "service",
		Short: "Show the Services in force, and which backend a connection gets",
		Args:  cobra.NoArgs,
	}
	cmd.AddCommand(newServiceListCommand(s), newServiceShowCommand(s), newServiceTraceCommand(s), newServiceDumpCommand(s))
	return cmd
}

// serviceJSON is a Service in "service list -o json"; the names of its fields stay.
type serviceJSON struct {
	Namespace string               `json:"namespace"`
	Name      string               `json:"name"`
	Type      string               `json:"type"`
	NotServed string               `json:"notServed,omitempty"` // why
	Ports     []servicePortSummary `json:"ports"`
	Problems  []string             `json:"problems"`
}

type servicePortSummary struct {
	Name      string         `json:"name"`
	Protocol  string         `json:"protocol"`
	Frontends []frontendJSON `json:"frontends"`
	Near      uint32         `json:"near"` // backends for clients on this node
	Far       *uint32        `json:"far"`  // for those from elsewhere; null where they have no frontend
	Affinity  uint32         `json:"affinitySeconds"`
}

type frontendJSON struct {
	Kind    string `json:"kind"`
	Address string `json:"address"`
	Port    uint32 `json:"port"`
	Near    string `json:"near"`          // set for clients on this node
	Far     string `json:"far,omitempty"` // set for those from elsewhere; none: not for them
}

func toFrontend(f *weftv1.ServiceFrontend) frontendJSON {
	return frontendJSON{Kind: f.GetKind(), Address: f.GetAddress(), Port: f.GetPort(), Near: f.GetNear(), Far: f.GetFar()}
}

func (f *frontendJSON) hostPort() string { return hostPort(f.Address, f.Port) }

func hostPort(address string, port uint32) string {
	return net.JoinHostPort(address, strconv.FormatUint(uint64(port), 10))
}

func newServiceListCommand(s IO) *cobra.Command {
	return askCommand(s, &cobra.Command{
		Use:   "list",
		Short: "List Services: their frontends on this node, and how many backends clients may get",
		Long: `List Services: their frontends on this node, and how many backends may be chosen
for clients on this node (near) and for those that come from elsewhere (far).`,
		Example: `  weft service list
  weft service list -o json | jq '.[] | select(.problems != [])'
  weft service list -o json | jq '.[] | select(any(.ports[]; .near == 0)) | .name'`,
		Args: cobra.NoArgs,
	}, func(ctx context.Context, c weftv1.NodeClient, _ []string) (any, func() error, error) {
		r, err := c.ListServices(ctx, &weftv1.ListServicesRequest{})
		if err != nil {
			return nil, nil, err
		}
		list := each(r.Services, toService)
		return list, func() error { return printServices(s.Out, list) }, nil
	})
}

func toService(p *weftv1.ServiceSummary) serviceJSON {
	return serviceJSON{
		Namespace: p.Namespace, Name: p.Name, Type: p.Type, NotServed: p.NotServed, Problems: append([]string{}, p.Problems...),
		Ports: each(p.Ports, func(p *weftv1.ServicePortSummary) servicePortSummary {
			out := servicePortSummary{
				Name: p.Name, Protocol: p.Protocol, Frontends: each(p.Frontends, toFrontend), Near: p.Near, Affinity: p.AffinitySeconds,
			}
			if p.External {
				out.Far = &p.Far
			}
			return out
		}),
	}
}

func printServices(w io.Writer, list []serviceJSON) error {
	var rows [][]string
	for i := range list {
		v := &list[i]
		name, problems := v.Namespace+"/"+v.Name, strings.Join(v.Problems, "; ")
		if v.NotServed != "" || len(v.Ports) == 0 {
			rows = append(rows, []string{name, v.Type, "-", dash(v.NotServed), "-", "-", "-", problems})
		}
		for j := range v.Ports {
			p := &v.Ports[j]
			far := "-"
			if p.Far != nil {
				far = strconv.FormatUint(uint64(*p.Far), 10)
			}
			rows = append(rows, []string{
				name, v.Type, portName(p.Name, p.Protocol), some(each(p.Frontends, frontendText), 3),
				strconv.FormatUint(uint64(p.Near), 10), far, affinityText(p.Affinity), problems,
			})
		}
	}
	return printTable(w, []string{"SERVICE", "TYPE", "PORT", "FRONTENDS", "NEAR", "FAR", "AFFINITY", "PROBLEMS"}, rows)
}

// portName is how a service port is called.
func portName(name, protocol string) string {
	if name == "" {
		return protocol
	}
	return name + "/" + protocol
}

func frontendText(f frontendJSON) string {
	if f.Kind == "ClusterIP" {
		return f.hostPort()
	}
	return f.hostPort() + " (" + f.Kind + ")"
}

func affinityText(seconds uint32) string {
	if seconds == 0 {
		return "-"
	}
	return shortDuration(time.Duration(seconds) * time.Second)
}

// shortDuration is d without the parts that are 0: "3h", not "3h0m0s".
func shortDuration(d time.Duration) string {
	text := d.String()
	if strings.HasSuffix(text, "m0s") {
		text = strings.TrimSuffix(text, "0s")
	}
	if strings.HasSuffix(text, "h0m") {
		text = strings.TrimSuffix(text, "0m")
	}
	return text
}

func newServiceDumpCommand(s IO) *cobra.Command {
	var agent agentFlag
	cmd := &cobra.Command{
		Use:   "dump",
		Short: "Print what the kernel's maps of Services hold",
		Long: `Print what the kernel's maps of Services hold, as text in an order that depends
on nothing else: what is in force, not what should be.`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			return agent.call(cmd.Context(), func(c weftv1.NodeClient) error {
				r, err := c.DumpServices(cmd.Context(), &weftv1.DumpServicesRequest{})
				if err != nil {
					return err
				}
				_, err = fmt.Fprint(s.Out, r.Text)
				return err
			})
		},
	}
	agent.register(cmd)
	return cmd
}
