// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"encoding/json"
	"fmt"
	"time"

	"github.com/spf13/cobra"

	"github.com/weft-mesh/weft/internal/bench"
)

func newBenchServicesCommand(s IO) *cobra.Command {
	var (
		common benchFlags
		plan   bench.ServicesPlan
	)
	cmd := &cobra.Command{
		Use:   "services",
		Short: "Connections to one of many services, changes and memory, beside kube-proxy",
		Long: `Measure what services cost at different numbers of them, two endpoints each:
how long it takes to program all of them, the time from a change of an endpoint
to the first connection that reaches the new one, memory, and then connections
through all of them in turns: how long connect takes, and processor time each.

Each has network namespaces of its own, and a cgroup: a client, a node that
forwards, and a server that has the addresses of all endpoints. With
--kube-proxy, a real kube-proxy is measured beside, in both of its modes;
test/kubeproxy/build.sh makes its folder of binaries.`,
		Args: cobra.NoArgs,
		Example: `  weft bench services --services 10,1000
  weft bench services --kube-proxy ~/.cache/weft/kubeproxy -o json`,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if err := common.validate(); err != nil {
				return err
			}
			plan.Rounds, plan.Warmup, plan.Duration = common.rounds, common.warmup, common.duration
			plan.Pin, plan.Calibration = common.pin, common.calibration
			plan.Self = []string{"/proc/self/exe", "bench"}
			plan.Progress = func(step string) { fmt.Fprintln(s.Err, step) }
			result, err := plan.Run(cmd.Context())
			if err != nil {
				return fmt.Errorf("measure services: %w", err)
			}
			if common.output != "json" {
				return result.Print(s.Out)
			}
			e := json.NewEncoder(s.Out)
			e.SetIndent("", "  ")
			return e.Encode(result)
		},
	}
	common.registerRounds(cmd)
	flags := cmd.Flags()
	flags.IntSliceVar(&plan.Counts, "services", []int{10, 1000, 10000, 50000}, "numbers of services, ascending; the rest is compared with the first")
	flags.StringVar(&plan.KubeProxy, "kube-proxy", "", "folder with etcd, kube-apiserver and kube-proxy")
	flags.IntSliceVar(&plan.KubeProxyCounts, "kube-proxy-services", []int{1000, 10000}, "numbers of services for kube-proxy")
	flags.IntVar(&plan.Changes, "changes", 20, "of an endpoint, on each node and in each way")
	flags.DurationVar(&plan.Pause, "pause", 1500*time.Millisecond, "before each change: kube-proxy writes at most once a second")
	flags.DurationVar(&plan.Budget, "budget", 3*time.Minute, "for each node to be programmed, and to be changed")
	return cmd
}
