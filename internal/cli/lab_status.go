// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"fmt"
	"io"
	"strconv"
	"strings"

	"github.com/spf13/cobra"

	"github.com/weft-mesh/weft/internal/lab/api"
)

func newLabStatusCommand(s IO, l *labFlag) *cobra.Command {
	var out outputFlag
	cmd := &cobra.Command{
		Use:   "status",
		Short: "Print nodes, deployments, pods and services of a lab",
		Args:  cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if err := out.check(); err != nil {
				return err
			}
			c, err := l.client()
			if err != nil {
				return err
			}
			st, err := c.Status(cmd.Context())
			if err != nil {
				return err
			}
			if out.json() {
				return printJSON(s.Out, st)
			}
			return printLabStatus(s.Out, st)
		},
	}
	out.register(cmd, "output format: table or json")
	return cmd
}

func printLabStatus(w io.Writer, st *api.Status) error {
	fmt.Fprintf(w, "lab %s, tunnel %s, MTU %d, generation %d, files in %s\n", st.Lab, st.Tunnel, st.MTU, st.Generation, st.Dir)
	tables := []struct {
		header []string
		rows   [][]string
	}{
		{[]string{"NODE", "IPS", "POD CIDRS", "AGENT", "READY", "RESTARTS", "MESSAGE"}, nodeRows(st.Nodes)},
		{[]string{"DEPLOYMENT", "READY", "PODS"}, deploymentRows(st.Deployments)},
		{[]string{"POD", "NODE", "IPS", "PHASE", "READY", "RESTARTS", "MESSAGE"}, podRows(st.Pods)},
		{[]string{"SERVICE", "TYPE", "IPS", "PORTS", "ENDPOINTS", "EXTERNAL"}, serviceRows(st.Services)},
	}
	for _, t := range tables {
		if len(t.rows) == 0 {
			continue
		}
		fmt.Fprintln(w)
		if err := printTable(w, t.header, t.rows); err != nil {
			return err
		}
	}
	return nil
}

func nodeRows(nodes []api.Node) (rows [][]string) {
	for _, n := range nodes {
		rows = append(rows, []string{n.Name, strings.Join(n.IPs, ","), strings.Join(n.PodCIDRs, ","), n.Agent.Process,
			strconv.FormatBool(n.Ready), strconv.Itoa(n.Agent.Restarts), n.Message})
	}
	return rows
}

func deploymentRows(ds []api.Deployment) (rows [][]string) {
	for _, d := range ds {
		rows = append(rows, []string{d.Namespace + "/" + d.Name, fmt.Sprintf("%d/%d", d.Ready, d.Wanted), strconv.Itoa(d.Pods)})
	}
	return rows
}

func podRows(pods []api.Pod) (rows [][]string) {
	for _, p := range pods {
		phase := p.Phase
		if p.Terminating {
			phase = "Terminating"
		}
		rows = append(rows, []string{p.Namespace + "/" + p.Name, p.Node, strings.Join(p.IPs, ","), phase,
			strconv.FormatBool(p.Ready), strconv.Itoa(p.Restarts), p.Message})
	}
	return rows
}

func serviceRows(services []api.Service) (rows [][]string) {
	for _, s := range services {
		rows = append(rows, []string{s.Namespace + "/" + s.Name, s.Type, strings.Join(s.IPs, ","), strings.Join(s.Ports, ","), strconv.Itoa(s.Endpoints), strings.Join(s.External, ",")})
	}
	return rows
}
