// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"bytes"
	"encoding/json"
	"strings"
	"testing"

	"github.com/weft-mesh/weft/internal/bench"
	"github.com/weft-mesh/weft/internal/netdev/nstest"
)

func TestBenchRefuses(t *testing.T) {
	nstest.Need(t)
	for want, args := range map[string]string{
		`load "x": it is one of rr, rr16, crr, stream`: "net --loads x",
		`lab name "a-b"`: "net --lab a-b",
		"lab nosuchlab: no namespace weft-nosuchlab-…":      "net --lab nosuchlab",
		`output "xml": table or json`:                       "rr -o xml",
		`path "x": baseline "x": it is one of host`:         "rr --pair-a x",
		`path "a,b": not of the form NETNS,NETNS,ADDR`:      "stream --pair-b a,b",
		`path "a,b,c": ParseAddr("c")`:                      "stream --pair-b a,b,c",
		"70000 bytes: 1 to 65536":                           "rr --bytes 70000 --pair-a a,b,10.0.0.1 --pair-b a,b,10.0.0.1",
		"0 rounds: at least 1":                              "rr --rounds 0 --pair-a a,b,10.0.0.1 --pair-b a,b,10.0.0.1",
		"numbers of services [20 10]":                       "services --services 20,10",
		"binary of etcd (test/kubeproxy/build.sh makes it)": "services --kube-proxy /proc/none",
		"start server in weft-none: open network namespace": "rr --calibration 0 --pair-a weft-none,weft-none,10.0.0.1 --pair-b host",
	} {
		t.Run(args, func(t *testing.T) {
			var out, errs bytes.Buffer
			code := Run(t.Context(), append([]string{"bench"}, strings.Fields(args)...), IO{In: strings.NewReader(""), Out: &out, Err: &errs})
			if code != 1 || !strings.Contains(errs.String(), want) || out.Len() > 0 {
				t.Errorf("code %d, out %q, error %q, want 1 and %q", code, &out, &errs, want)
			}
		})
	}
}

func TestPickLoadsKeepsTheirOrder(t *testing.T) {
	loads, err := pickLoads([]string{"stream", "rr"})
	if err != nil || len(loads) != 2 || loads[0].Mode != bench.RR || loads[1].Mode != bench.Stream {
		t.Errorf("got %v, %v", loads, err)
	}
}

// What -o json prints can be read again, and has every sample.
func TestBenchPrintJSON(t *testing.T) {
	var out bytes.Buffer
	f := benchFlags{output: "json"}
	result := &bench.Result{Cases: []bench.CaseResult{{Samples: []bench.Sample{{Target: "a", Round: 1}}}}}
	if err := f.print(IO{Out: &out}, []*bench.Result{result}); err != nil {
		t.Fatal(err)
	}
	var back []bench.Result
	if err := json.Unmarshal(out.Bytes(), &back); err != nil || back[0].Cases[0].Samples[0].Target != "a" {
		t.Errorf("%v from %s", err, out.String())
	}
}
