// SPDX-License-Identifier: Apache-2.0

package metrics

import (
	"net/http/httptest"
	"strings"
	"testing"

	weftv1 "github.com/weft-mesh/weft/api/weft/v1"
)

func TestHandler(t *testing.T) {
	st := &weftv1.StatusResponse{
		Node: "n1", Version: "v1", Routing: "vxlan", Generation: 7, Pods: []*weftv1.PodStatus{{}},
		Components: []*weftv1.Component{{Name: "policy", Message: "the map is full"}, {Name: "cni", Ready: true}},
		Maps:       []*weftv1.MapFill{{Name: "policy", Entries: 3, MaxEntries: 9}},
		Events:     &weftv1.Events{Generated: 11, Lost: 4},
		Drops:      []*weftv1.Counter{{Name: "policy", Packets: 5, Bytes: 300}},
		Services:   &weftv1.ServicesStatus{Services: 2, Frontends: 5, Backends: 3, Problems: []string{"x"}, Error: "full", SyncSeconds: 0.5, MaglevBytes: 2008, Flows: 6, Cut: 1},
		Forwarded:  []*weftv1.Counter{{Name: "local-pod", Packets: 2, Bytes: 120}},
	}
	w := httptest.NewRecorder()
	Handler(func() *weftv1.StatusResponse { return st }).ServeHTTP(w, httptest.NewRequest("GET", "/metrics", nil))
	if w.Code != 200 {
		t.Fatalf("code %d: %s", w.Code, w.Body)
	}
	for _, want := range []string{
		`weft_agent_info{node="n1",routing="vxlan",version="v1"} 1`,
		`weft_component_ready{component="cni"} 1`,
		`weft_component_ready{component="policy"} 0`,
		`weft_dropped_packets_total{reason="policy"} 5`,
		`weft_forwarded_bytes_total{path="local-pod"} 120`,
		`weft_manifest_generation 7`,
		`weft_map_entries{map="policy"} 3`,
		`weft_map_max_entries{map="policy"} 9`,
		`weft_events_total 11`,
		`weft_events_lost_total 4`,
		`weft_pods 1`,
		`weft_services 2`,
		`weft_service_backends 3`,
		`weft_service_problems 1`,
		`weft_services_in_force 0`,
		`weft_services_sync_seconds 0.5`,
		`weft_maglev_bytes 2008`,
		`weft_service_flows 6`,
		`weft_service_sockets_cut_total 1`,
	} {
		if !strings.Contains(w.Body.String(), want+"\n") {
			t.Errorf("no line %q", want)
		}
	}
}
