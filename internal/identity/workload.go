// SPDX-License-Identifier: Apache-2.0

package identity

import (
	"fmt"

	"github.com/cilium/statedb"

	"github.com/weft-mesh/weft/internal/state"
)

// AssignWorkloads returns the numbers of workloads as a snapshot has them and
// their namespaces, in their order; see AssignAll.
func (a *Allocator) AssignWorkloads(t *state.Tables, txn statedb.ReadTxn, ws []*state.Workload) ([]uint64, error) {
	contents := make([]Content, len(ws))
	for i, w := range ws {
		contents[i] = Content{Namespace: w.Namespace, ServiceAccount: w.ServiceAccount, Labels: w.Labels}
		if ns, _, ok := t.Namespaces.Get(txn, state.NamespaceByName.Query(w.Namespace)); ok {
			contents[i].NamespaceLabels = ns.Labels
		}
	}
	ids, err := a.AssignAll(contents)
	if err != nil {
		return nil, fmt.Errorf("assign identities: %w", err)
	}
	return ids, nil
}
