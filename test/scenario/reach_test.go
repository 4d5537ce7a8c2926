// SPDX-License-Identifier: Apache-2.0

package scenario

import (
	"bytes"
	"encoding/json"
	"fmt"
	"net"
	"slices"
	"strings"
	"text/tabwriter"

	"github.com/rogpeppe/go-internal/testscript"
	"golang.org/x/sync/errgroup"

	"github.com/weft-mesh/weft/internal/lab/api"
	"github.com/weft-mesh/weft/internal/serve"
	"github.com/weft-mesh/weft/test/testlab"
)

// reachParallel is how many pairs are tried at the same time.
const reachParallel = 4

// reach tries each pair of a table and compares. The table has the columns
//
//	FROM   a pod, a node, or outside
//	TO     NAME:PORT, asked by HTTP; NAME:PORT/udp, an echo server
//	IPV4   whom the server saw: "itself" for the address of FROM, else the name
//	       of the one whose address it was; "yes" for UDP; "no" where nothing came
//	IPV6   likewise
//
// Nothing is tried twice: what a lab says is in force must work at once.
func reach(ts *testscript.TestScript, neg bool, args []string) {
	if neg || len(args) != 1 {
		ts.Fatalf("usage: reach FILE")
	}
	var rows [][]string
	for line := range strings.Lines(ts.ReadFile(args[0])) {
		if f := strings.Fields(line); len(f) == 4 && f[0] != "FROM" {
			rows = append(rows, f)
		} else if len(f) != 0 && f[0] != "FROM" && !strings.HasPrefix(f[0], "#") {
			ts.Fatalf("%s: %q: want FROM TO IPV4 IPV6", args[0], line)
		}
	}
	st := labStatus(ts)
	var g errgroup.Group
	g.SetLimit(reachParallel)
	have, notes := make([][]string, len(rows)), make([]string, len(rows))
	for i, row := range rows {
		g.Go(func() error {
			have[i], notes[i] = tryBoth(ts, st, row[0], row[1])
			return nil
		})
	}
	_ = g.Wait() // a pair that fails is in the table
	ts.Logf("%s", table(have))
	if !slices.EqualFunc(rows, have, slices.Equal) {
		ts.Fatalf("want\n%sbut it is\n%s%s", table(rows), table(have), strings.Join(notes, ""))
	}
}

func table(rows [][]string) string {
	var b bytes.Buffer
	w := tabwriter.NewWriter(&b, 0, 8, 2, ' ', 0)
	for _, r := range append([][]string{{"FROM", "TO", "IPV4", "IPV6"}}, rows...) {
		fmt.Fprintln(w, strings.Join(r, "\t"))
	}
	w.Flush()
	return b.String()
}

// tryBoth tries a pair by both families; notes say why something failed.
func tryBoth(ts *testscript.TestScript, st *api.Status, from, to string) (row []string, notes string) {
	row = []string{from, to, "-", "-"}
	name, port, _ := strings.Cut(to, ":")
	ips, err := ipsOf(st, name)
	if err != nil {
		return row, err.Error() + "\n"
	}
	for _, ip := range ips {
		column := 2
		if strings.Contains(ip, ":") {
			column = 3
		}
		row[column], err = try(ts, st, from, ip, port)
		if err != nil {
			notes += err.Error() + "\n"
		}
	}
	return row, notes
}

func try(ts *testscript.TestScript, st *api.Status, from, ip, port string) (string, error) {
	wrap := testlab.OnNode
	if strings.Contains(from, "/") {
		wrap = testlab.InPod
	}
	if udp, ok := strings.CutSuffix(port, "/udp"); ok {
		if _, err := labOf(ts).Weft(ctxOf(ts), wrap(from, "weft", "probe", net.JoinHostPort(ip, udp)+"/udp")...); err != nil {
			return "no", err
		}
		return "yes", nil
	}
	out, err := labOf(ts).Weft(ctxOf(ts), wrap(from, "weft", "get", "--timeout", "4s", "http://"+net.JoinHostPort(ip, port)+"/")...)
	if err != nil {
		return "no", err
	}
	_, body, _ := strings.Cut(out, "{")
	var answer serve.Answer
	if err := json.Unmarshal([]byte("{"+body), &answer); err != nil {
		return "no", fmt.Errorf("read the answer to %s: %w: %s", from, err, out)
	}
	client, _, err := net.SplitHostPort(answer.Client)
	if err != nil {
		return "no", err
	}
	return owner(st, from, client), nil
}

// owner names the one whose address ip is.
func owner(st *api.Status, from, ip string) string {
	names := []string{from, "outside"}
	for _, n := range st.Nodes {
		names = append(names, n.Name)
		if slices.Contains(gateways(n), ip) {
			return n.Name + "-gateway"
		}
	}
	for _, p := range st.Pods {
		names = append(names, p.Namespace+"/"+p.Name)
	}
	for _, n := range names {
		if ips, err := ipsOf(st, n); err == nil && slices.Contains(ips, ip) {
			if n == from {
				return "itself"
			}
			return n
		}
	}
	return ip
}

// gateways are the first addresses of a node's pod CIDRs.
func gateways(n api.Node) []string {
	var out []string
	for _, c := range n.PodCIDRs {
		base, _, _ := strings.Cut(c, "/")
		if strings.HasSuffix(base, "::") {
			out = append(out, base+"1")
		} else {
			out = append(out, strings.TrimSuffix(base, "0")+"1")
		}
	}
	return out
}
