// SPDX-License-Identifier: Apache-2.0

package cni

import (
	"encoding/json"
	"errors"
	"fmt"
	"net/netip"
	"slices"

	"github.com/weft-mesh/weft/internal/addr"
	"github.com/weft-mesh/weft/internal/ipam"
	"github.com/weft-mesh/weft/internal/netdev"
	"github.com/weft-mesh/weft/internal/state"
)

// record is what is stored with the addresses of an attachment.
type record struct {
	Network   string       `json:"network"`
	Netns     string       `json:"netns"`
	Namespace string       `json:"namespace"`
	Name      string       `json:"name"`
	UID       string       `json:"uid,omitempty"`
	Identity  uint64       `json:"identity"`
	Gateways  []netip.Addr `json:"gateways"`
	Sources   []netip.Addr `json:"sources"`
	MTU       int          `json:"mtu"`
	// Ifindex of the node's side of the link; 0 before it was made.
	Ifindex int `json:"ifindex,omitempty"`
	// Wired once an Add has been carried out in whole.
	Wired bool `json:"wired,omitempty"`
}

// attachment is an allocation with its record decoded.
type attachment struct {
	ipam.Key
	IPs []netip.Addr
	record
}

func decode(a ipam.Allocation) (*attachment, error) {
	out := &attachment{Key: a.Key, IPs: a.IPs}
	if err := json.Unmarshal(a.Data, &out.record); err != nil {
		return nil, fmt.Errorf("record of %s: %w", a.Key, err)
	}
	return out, nil
}

func (r *record) encode() (json.RawMessage, error) {
	b, err := json.Marshal(r)
	if err != nil {
		return nil, fmt.Errorf("encode record of pod %s: %w", state.Key(r.Namespace, r.Name), err)
	}
	return b, nil
}

// seed decides the name and hardware addresses of the link.
func (a *attachment) seed() string { return a.Key.String() }

func (a *attachment) hostName() string { return netdev.HostName(a.seed()) }

func (a *attachment) pod() string { return state.Key(a.Namespace, a.Name) }

// spec is the link as it was asked for first; see Server.spec.
func (a *attachment) spec() netdev.PodLinkSpec {
	return netdev.PodLinkSpec{
		Seed: a.seed(), Netns: a.Netns, Interface: a.Interface,
		IPs: a.IPs, Gateways: a.Gateways, Sources: a.Sources, MTU: a.MTU,
	}
}

func (a *attachment) row() *state.Pod {
	hostMAC, podMAC := netdev.MACs(a.seed())
	return &state.Pod{
		ContainerID: a.ContainerID,
		Namespace:   a.Namespace,
		Name:        a.Name,
		IPs:         a.IPs,
		Interface:   a.hostName(),
		Ifindex:     a.Ifindex,
		MAC:         podMAC.String(),
		HostMAC:     hostMAC.String(),
		Identity:    a.Identity,
		Netns:       a.Netns,
	}
}

// attachment returns what is stored for k; ok is false if nothing is.
func (s *Server) attachment(k ipam.Key) (_ *attachment, ok bool, err error) {
	alloc, ok := s.pool.Get(k)
	if !ok {
		return nil, false, nil
	}
	a, err := decode(alloc)
	return a, err == nil, err
}

// attachments returns all that is stored. What cannot be decoded is named in
// the error.
func (s *Server) attachments() ([]*attachment, error) {
	var out []*attachment
	var errs []error
	for _, alloc := range s.pool.All() {
		a, err := decode(alloc)
		if err != nil {
			errs = append(errs, err)
			continue
		}
		out = append(out, a)
	}
	return out, errors.Join(errs...)
}

// spec is the link of a, with the addresses that the node has now: a route from
// an address that is not local is refused, and any route is better than none.
func (s *Server) spec(a *attachment) (netdev.PodLinkSpec, error) {
	spec := a.spec()
	local, err := s.net.Addresses()
	if err != nil {
		return spec, err
	}
	if node, _, ok := s.tables.Nodes.Get(s.tables.DB.ReadTxn(), state.NodeByName.Query(s.config.Node)); ok {
		spec.Sources = valid(addr.Pick(node.IPs))
	}
	spec.Sources = slices.DeleteFunc(slices.Clone(spec.Sources), func(ip netip.Addr) bool { return !slices.Contains(local, ip) })
	return spec, nil
}

// Recorded returns the row of every pod that is recorded with a link, whether or
// not it is in the table: also of those that are pending.
func (s *Server) Recorded() ([]*state.Pod, error) {
	list, err := s.attachments()
	var out []*state.Pod
	for _, a := range list {
		if a.Ifindex != 0 {
			out = append(out, a.row())
		}
	}
	return out, err
}

// LargestIdentity returns the largest number in records of the pool; 0 if there
// is none.
func LargestIdentity(list []ipam.Allocation) (uint64, error) {
	largest := uint64(0)
	for _, alloc := range list {
		a, err := decode(alloc)
		if err != nil {
			return 0, err
		}
		largest = max(largest, a.Identity)
	}
	return largest, nil
}

// store writes the record of a.
func (s *Server) store(a *attachment) error {
	data, err := a.encode()
	if err != nil {
		return err
	}
	return s.pool.SetData(a.Key, data)
}

func (s *Server) insertRow(row *state.Pod) error {
	txn := s.tables.DB.WriteTxn(s.tables.Pods)
	defer txn.Abort()
	if _, _, err := s.tables.Pods.Insert(txn, row); err != nil {
		return fmt.Errorf("insert row of pod %s: %w", state.Key(row.Namespace, row.Name), err)
	}
	txn.Commit()
	return nil
}

func (s *Server) deleteRow(containerID string) error {
	txn := s.tables.DB.WriteTxn(s.tables.Pods)
	defer txn.Abort()
	if _, _, err := s.tables.Pods.Delete(txn, &state.Pod{ContainerID: containerID}); err != nil {
		return fmt.Errorf("delete row of container %s: %w", containerID, err)
	}
	txn.Commit()
	return nil
}

// row returns the row of a container.
func (s *Server) row(containerID string) (*state.Pod, bool) {
	pod, _, ok := s.tables.Pods.Get(s.tables.DB.ReadTxn(), state.PodByContainer.Query(containerID))
	return pod, ok
}
