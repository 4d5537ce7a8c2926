// SPDX-License-Identifier: Apache-2.0

package netdev

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io/fs"
	"net/netip"
	"syscall"

	"github.com/vishvananda/netlink/nl"
	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"
)

// ErrNoDestroy is wrapped by errors of a kernel that cannot cut sockets.
var ErrNoDestroy = errors.New("this kernel cannot cut sockets (CONFIG_INET_UDP_DIAG, CONFIG_INET_DIAG_DESTROY)")

// UDPSocket names a connected UDP socket and what it is connected to.
type UDPSocket struct {
	Cookie uint64 // SO_COOKIE; unique on the machine until it boots again
	Peer   netip.AddrPort
}

// CutUDP cuts the given sockets that are in the node's network namespace or in
// one of those at paths, as long as they are connected to the given peer: who
// waits for data on one gets ECONNABORTED, and it is connected to nothing then
// (send: EDESTADDRREQ). Other sockets, also with the same addresses, are left
// alone. A path that is gone is passed over. It returns how many were cut, also with an
// error, which is about the namespaces and sockets that it could not do.
func (n *Net) CutUDP(paths []string, sockets []UDPSocket) (int, error) {
	c := &cutter{want: map[uint64]netip.AddrPort{}}
	for _, s := range sockets {
		c.want[s.Cookie] = netip.AddrPortFrom(s.Peer.Addr().Unmap(), s.Peer.Port())
	}
	var errs []error
	if len(c.want) > 0 {
		if err := c.cutIn(n.ns); err != nil {
			errs = append(errs, fmt.Errorf("sockets of the node: %w", err))
		}
	}
	for _, p := range paths {
		if len(c.want) == 0 {
			break
		}
		if err := c.cutAt(p); err != nil {
			errs = append(errs, fmt.Errorf("sockets in %s: %w", p, err))
		}
	}
	return c.cut, errors.Join(errs...)
}

// cutter is one call of CutUDP.
type cutter struct {
	want map[uint64]netip.AddrPort // peers by cookie; a socket that was found is deleted
	cut  int
}

func (c *cutter) cutAt(path string) error {
	ns, err := netns.GetFromPath(path)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("open the network namespace: %w", err)
	}
	defer ns.Close()
	var st unix.Statfs_t
	if err := unix.Fstatfs(int(ns), &st); err == nil && st.Type != unix.NSFS_MAGIC {
		return nil // what is left of a namespace that was unmounted
	}
	return c.cutIn(ns)
}

func (c *cutter) cutIn(ns netns.NsHandle) error {
	return inNamespace(ns, func() error {
		return errors.Join(c.cutFamily(unix.AF_INET), c.cutFamily(unix.AF_INET6))
	})
}

// cutFamily goes on while it finds sockets: of two with the same addresses
// (SO_REUSEPORT) the kernel can only find one, until that is cut.
func (c *cutter) cutFamily(family uint8) error {
	for {
		before := len(c.want)
		found, err := c.find(family)
		if err != nil {
			return err
		}
		for _, id := range found {
			if err := c.destroy(family, id); err != nil {
				return err
			}
		}
		if len(c.want) == before {
			return nil
		}
	}
}

// diagID is struct inet_diag_sockid: addresses, ports, device and cookie, as the
// kernel wrote it.
type diagID [48]byte

func (id *diagID) cookie() uint64 { return binary.NativeEndian.Uint64(id[40:]) }

func (id *diagID) peer(family uint8) netip.AddrPort {
	port := binary.BigEndian.Uint16(id[2:])
	if family == unix.AF_INET {
		return netip.AddrPortFrom(netip.AddrFrom4([4]byte(id[20:24])), port)
	}
	return netip.AddrPortFrom(netip.AddrFrom16([16]byte(id[20:36])).Unmap(), port)
}

// diagRequest is struct inet_diag_req_v2.
type diagRequest struct {
	family uint8
	id     diagID
}

const connected = 1 << 1 // TCP_ESTABLISHED, which UDP has as well

func (r *diagRequest) Len() int { return 8 + len(r.id) }

func (r *diagRequest) Serialize() []byte {
	b := make([]byte, r.Len())
	b[0], b[1] = r.family, unix.IPPROTO_UDP
	binary.NativeEndian.PutUint32(b[4:], connected)
	copy(b[8:], r.id[:])
	return b
}

// find returns the wanted sockets of a family in the thread's namespace.
func (c *cutter) find(family uint8) ([]diagID, error) {
	req := nl.NewNetlinkRequest(nl.SOCK_DIAG_BY_FAMILY, unix.NLM_F_DUMP)
	req.AddData(&diagRequest{family: family})
	messages, err := dump(func() ([][]byte, error) {
		return req.Execute(unix.NETLINK_INET_DIAG, nl.SOCK_DIAG_BY_FAMILY)
	})
	if errors.Is(err, unix.ENOENT) {
		err = ErrNoDestroy
	}
	if err != nil {
		return nil, fmt.Errorf("list UDP sockets: %w", err)
	}
	var out []diagID
	for _, m := range messages {
		const head = 4 // family, state, timer, retransmissions
		if len(m) < head+len(diagID{}) {
			continue
		}
		id := diagID(m[head:])
		if peer, ok := c.want[id.cookie()]; ok && peer == id.peer(family) {
			out = append(out, id)
		}
	}
	return out, nil
}

// destroy cuts one socket. One that the kernel does not find, or finds another
// in its place (ESTALE), stays wanted.
func (c *cutter) destroy(family uint8, id diagID) error {
	req := nl.NewNetlinkRequest(nl.SOCK_DESTROY, unix.NLM_F_ACK)
	req.AddData(&diagRequest{family: family, id: id})
	_, err := req.Execute(unix.NETLINK_INET_DIAG, 0)
	switch {
	case err == nil:
		delete(c.want, id.cookie())
		c.cut++
		return nil
	case errors.Is(err, syscall.ENOENT), errors.Is(err, syscall.ESTALE):
		return nil
	case errors.Is(err, syscall.EOPNOTSUPP):
		err = ErrNoDestroy
	}
	return fmt.Errorf("cut the UDP socket to %s: %w", id.peer(family), err)
}
