// SPDX-License-Identifier: Apache-2.0

// Package metrics tells Prometheus what `weft status` tells people.
package metrics

import (
	"net/http"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
	"github.com/prometheus/client_golang/prometheus/promhttp"

	weftv1 "github.com/weft-mesh/weft/api/weft/v1"
)

// Handler serves the state of the agent, read anew at each scrape, and that of
// its process. status must not block for long.
func Handler(status func() *weftv1.StatusResponse) http.Handler {
	r := prometheus.NewRegistry()
	r.MustRegister(&collector{status}, collectors.NewGoCollector(), collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}))
	return promhttp.HandlerFor(r, promhttp.HandlerOpts{MaxRequestsInFlight: 4})
}

// collector reads one status for each scrape.
type collector struct {
	status func() *weftv1.StatusResponse
}

func describe(name, help string, labels ...string) *prometheus.Desc {
	return prometheus.NewDesc("weft_"+name, help, labels, nil)
}

var (
	info       = describe("agent_info", "Version and routing of the agent.", "node", "version", "routing")
	component  = describe("component_ready", "1 where a part of the agent is ready; 0 with policy means that the last change is not in force.", "component")
	pods       = describe("pods", "Pods of this node that are wired.")
	generation = describe("manifest_generation", "Generation of the manifests that were read last.")
	refused    = describe("manifest_errors", "What of the manifests was refused.")
	entries    = describe("map_entries", "Entries of a kernel map.", "map")
	capacity   = describe("map_max_entries", "Entries that a kernel map has room for.", "map")
	events     = describe("events_total", "Flow events that the datapath made.")
	lost       = describe("events_lost_total", "Flow events that found the kernel's ring full.")
	dropped    = describe("dropped_packets_total", "Packets dropped by the datapath.", "reason")
	forwarded  = describe("forwarded_packets_total", "Packets passed on by the datapath.", "path")
	bytes      = describe("forwarded_bytes_total", "Bytes passed on by the datapath.", "path")

	services     = describe("services", "Services that have frontends on this node.")
	servicePorts = describe("service_ports", "Service ports that are balanced.")
	frontends    = describe("service_frontends", "Addresses and ports of Services.")
	backends     = describe("service_backends", "Backends of all service ports.")
	problems     = describe("service_problems", "What of Services and EndpointSlices is left out.")
	inForce      = describe("services_in_force", "1 where the last change of Services is in force.")
	syncTime     = describe("services_sync_seconds", "Time that the last change of Services took.")
	tables       = describe("maglev_tables", "Tables of Maglev.")
	tableBytes   = describe("maglev_bytes", "Kernel memory of the tables of Maglev.")
	flows        = describe("service_flows", "Connections that are translated packet by packet.")
	cut          = describe("service_sockets_cut_total", "Sockets cut because their backend had gone, since the agent started.")
	denied       = describe("denied_networks", "Networks on the deny list.")
)

func all() []*prometheus.Desc {
	return []*prometheus.Desc{
		info, component, pods, generation, refused, entries, capacity, events, lost, dropped, forwarded, bytes,
		services, servicePorts, frontends, backends, problems, inForce, syncTime, tables, tableBytes, flows, cut, denied,
	}
}

func (c *collector) Describe(out chan<- *prometheus.Desc) {
	for _, d := range all() {
		out <- d
	}
}

func (c *collector) Collect(out chan<- prometheus.Metric) {
	st := c.status()
	emit := emitter(func(d *prometheus.Desc, t prometheus.ValueType, v float64, labels ...string) {
		out <- prometheus.MustNewConstMetric(d, t, v, labels...)
	})
	emit(info, prometheus.GaugeValue, 1, st.Node, st.Version, st.Routing)
	for _, p := range st.Components {
		emit(component, prometheus.GaugeValue, number(p.Ready), p.Name)
	}
	emit(pods, prometheus.GaugeValue, float64(len(st.Pods)))
	emit(generation, prometheus.GaugeValue, float64(st.Generation))
	emit(refused, prometheus.GaugeValue, float64(len(st.SourceErrors)))
	for _, m := range st.Maps {
		emit(entries, prometheus.GaugeValue, float64(m.Entries), m.Name)
		emit(capacity, prometheus.GaugeValue, float64(m.MaxEntries), m.Name)
	}
	if e := st.Events; e != nil {
		emit(events, prometheus.CounterValue, float64(e.Generated))
		emit(lost, prometheus.CounterValue, float64(e.Lost))
	}
	if s := st.Services; s != nil {
		emit.services(s)
	}
	for _, n := range st.Drops {
		emit(dropped, prometheus.CounterValue, float64(n.Packets), n.Name)
	}
	for _, n := range st.Forwarded {
		emit(forwarded, prometheus.CounterValue, float64(n.Packets), n.Name)
		emit(bytes, prometheus.CounterValue, float64(n.Bytes), n.Name)
	}
}

func number(b bool) float64 {
	if b {
		return 1
	}
	return 0
}

// emitter gives a value away.
type emitter func(d *prometheus.Desc, t prometheus.ValueType, v float64, labels ...string)

func (emit emitter) services(s *weftv1.ServicesStatus) {
	for d, v := range map[*prometheus.Desc]float64{
		services: float64(s.Services), servicePorts: float64(s.Ports), frontends: float64(s.Frontends), backends: float64(s.Backends),
		problems: float64(len(s.Problems)), inForce: number(s.Error == ""), syncTime: s.SyncSeconds,
		tables: float64(s.MaglevTables), tableBytes: float64(s.MaglevBytes), flows: float64(s.Flows), denied: float64(s.Denied),
	} {
		emit(d, prometheus.GaugeValue, v)
	}
	emit(cut, prometheus.CounterValue, float64(s.Cut))
}
