// SPDX-License-Identifier: Apache-2.0

package bench

import (
	"fmt"
	"io"
	"strconv"
	"text/tabwriter"
)

// Print writes the result for people.
func (r *ServicesResult) Print(out io.Writer) error {
	w := &writer{w: out}
	w.printf("services, 2 endpoints each; changes of one endpoint %v apart, until the first connection that reaches the new one\n\n", r.Plan.Pause)
	t := &writer{w: tabwriter.NewWriter(w, 0, 0, 2, ' ', tabwriter.AlignRight)}
	t.printf("\tstart s\tsync s\tchange by\tn\tp50 ms\tp99 ms\tfailed\theap MB\tkernel MB\t\n")
	for _, n := range r.Nodes {
		n.print(t)
	}
	w.flush(t)
	w.printf("  start: of the process to the first connection by the last service; sync: of that, writing to the kernel\n")
	w.printf("  failed: connections while a change was waited for; heap: manifests and tables + driver; kernel: BPF maps, empty + what is in them\n\n")
	if w.err != nil {
		return w.err
	}
	return r.Connect.Print(out)
}

func (n *NodeResult) print(t *writer) {
	heap, kernel := "", ""
	if n.Memory != nil {
		heap, kernel = megabytes(n.Memory.Tables)+" + "+megabytes(n.Memory.Heap-min(n.Memory.Heap, n.Memory.Tables)), megabytes(n.Memory.KernelEmpty)+" + "+megabytes(n.Memory.Kernel)
	}
	t.printf("%s\t%.2f\t%.3f\t", n.Target, n.Start, n.Sync)
	if len(n.Changes) == 0 {
		t.printf("\t\t\t\t\t%s\t%s\t\n", heap, kernel)
	}
	for i, c := range n.Changes {
		if i > 0 {
			t.printf("\t\t\t")
			heap, kernel = "", ""
		}
		t.printf("%s\t%d\t%.2f\t%.2f\t%s\t%s\t%s\t\n", c.By, len(c.Milliseconds), c.P50, c.P99, strconv.Itoa(c.Errors), heap, kernel)
	}
}

func megabytes(bytes uint64) string { return fmt.Sprintf("%.1f", float64(bytes)/1e6) }
