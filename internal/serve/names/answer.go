// SPDX-License-Identifier: Apache-2.0

package names

import (
	"encoding/hex"
	"math/rand/v2"
	"net/netip"
	"slices"
	"strconv"
	"strings"

	"github.com/miekg/dns"
)

// Answer is the whole answer to a query, of whatever size.
func (z *Zone) Answer(query *dns.Msg) *dns.Msg {
	m := new(dns.Msg)
	m.SetReply(query)
	switch {
	case query.Opcode != dns.OpcodeQuery:
		m.Rcode = dns.RcodeNotImplemented
	case len(query.Question) != 1:
		m.Rcode = dns.RcodeFormatError
	case query.Question[0].Qclass != dns.ClassINET:
		m.Rcode = dns.RcodeRefused
	default:
		z.fill(m, query.Question[0])
	}
	return m
}

// fill answers one question. What is not the cluster's is refused at once: there
// is nobody to ask.
func (z *Zone) fill(m *dns.Msg, q dns.Question) {
	name := strings.ToLower(q.Name)
	ip, reverse := reverseAddr(name)
	switch {
	case dns.IsSubDomain(z.domain, name):
		m.Authoritative = true
		z.forward(m, q, name)
	case reverse && (len(z.ptr[ip]) > 0 || ip.IsPrivate()):
		m.Authoritative = true
		z.reverse(m, q, ip)
	default:
		m.Rcode = dns.RcodeRefused
	}
	if m.Authoritative && len(m.Answer) == 0 && m.Rcode != dns.RcodeServerFailure {
		m.Ns = []dns.RR{z.soa()}
	}
}

// forward follows a name through external names, as far as they stay here.
func (z *Zone) forward(m *dns.Msg, q dns.Question, name string) {
	owner := q.Name
	for range maxAliases {
		rec := z.lookup(name)
		if rec == nil {
			m.Rcode = dns.RcodeNameError
			return
		}
		if rec.alias == "" {
			m.Answer = append(m.Answer, z.records(owner, name, rec, q.Qtype)...)
			m.Extra = append(m.Extra, z.targets(m.Answer)...)
			return
		}
		m.Answer = append(m.Answer, &dns.CNAME{Hdr: header(owner, dns.TypeCNAME), Target: rec.alias})
		owner, name = rec.alias, strings.ToLower(rec.alias)
		if q.Qtype == dns.TypeCNAME || q.Qtype == dns.TypeANY || !dns.IsSubDomain(z.domain, name) {
			return
		}
	}
	m.Answer, m.Rcode = nil, dns.RcodeServerFailure // they lead in a circle
}

// records are those of one name and type, addresses in a random order.
func (z *Zone) records(owner, name string, rec *record, qtype uint16) []dns.RR {
	var out []dns.RR
	is := func(t uint16) bool { return qtype == t || qtype == dns.TypeANY }
	ips := slices.Clone(rec.ips)
	rand.Shuffle(len(ips), func(i, j int) { ips[i], ips[j] = ips[j], ips[i] })
	for _, ip := range ips {
		if t := typeOf(ip); is(t) {
			out = append(out, address(owner, ip))
		}
	}
	for _, s := range rec.srv {
		if is(dns.TypeSRV) {
			out = append(out, &dns.SRV{Hdr: header(owner, dns.TypeSRV), Weight: uint16(max(1, 100/len(rec.srv))), Port: s.Port, Target: s.Target})
		}
	}
	if rec.text != "" && is(dns.TypeTXT) {
		out = append(out, &dns.TXT{Hdr: header(owner, dns.TypeTXT), Txt: []string{rec.text}})
	}
	if name == z.domain && is(dns.TypeSOA) {
		out = append(out, z.soa())
	}
	if name == z.domain && is(dns.TypeNS) {
		out = append(out, &dns.NS{Hdr: header(owner, dns.TypeNS), Ns: z.server()})
	}
	return out
}

// targets are the addresses of the targets of SRV records.
func (z *Zone) targets(answers []dns.RR) []dns.RR {
	var out []dns.RR
	seen := map[string]bool{}
	for _, rr := range answers {
		s, ok := rr.(*dns.SRV)
		if !ok || seen[s.Target] {
			continue
		}
		seen[s.Target] = true
		if rec := z.lookup(s.Target); rec != nil {
			for _, ip := range rec.ips {
				out = append(out, address(s.Target, ip))
			}
		}
	}
	return out
}

func (z *Zone) reverse(m *dns.Msg, q dns.Question, ip netip.Addr) {
	names := z.ptr[ip]
	if len(names) == 0 {
		m.Rcode = dns.RcodeNameError
		return
	}
	if q.Qtype != dns.TypePTR && q.Qtype != dns.TypeANY {
		return
	}
	for _, name := range names {
		m.Answer = append(m.Answer, &dns.PTR{Hdr: header(q.Name, dns.TypePTR), Ptr: name})
	}
}

// server is the name of who answers.
func (z *Zone) server() string { return "kube-dns.kube-system.svc." + z.domain }

func (z *Zone) soa() *dns.SOA {
	return &dns.SOA{
		Hdr: header(z.domain, dns.TypeSOA), Ns: z.server(), Mbox: "hostmaster." + z.domain,
		Serial: z.serial, Refresh: 7200, Retry: 1800, Expire: 86400, Minttl: ttl,
	}
}

func header(owner string, t uint16) dns.RR_Header {
	return dns.RR_Header{Name: owner, Rrtype: t, Class: dns.ClassINET, Ttl: ttl}
}

func typeOf(ip netip.Addr) uint16 {
	if ip.Is4() {
		return dns.TypeA
	}
	return dns.TypeAAAA
}

func address(owner string, ip netip.Addr) dns.RR {
	if ip.Is4() {
		return &dns.A{Hdr: header(owner, dns.TypeA), A: ip.AsSlice()}
	}
	return &dns.AAAA{Hdr: header(owner, dns.TypeAAAA), AAAA: ip.AsSlice()}
}

// reverseAddr reads the address of a name below in-addr.arpa or ip6.arpa.
func reverseAddr(name string) (netip.Addr, bool) {
	if rest, ok := strings.CutSuffix(name, ".in-addr.arpa."); ok {
		labels := strings.Split(rest, ".")
		slices.Reverse(labels)
		ip, err := netip.ParseAddr(strings.Join(labels, "."))
		return ip, err == nil && ip.Is4()
	}
	rest, ok := strings.CutSuffix(name, ".ip6.arpa.")
	if !ok {
		return netip.Addr{}, false
	}
	labels := strings.Split(rest, ".")
	slices.Reverse(labels)
	digits := strings.Join(labels, "")
	b, err := hex.DecodeString(digits)
	if err != nil || len(b) != 16 || len(labels) != 32 {
		return netip.Addr{}, false
	}
	return netip.AddrFrom16([16]byte(b)), true
}

// describe is one line for logs: the question and how it was answered.
func describe(m *dns.Msg) string {
	if len(m.Question) != 1 {
		return dns.RcodeToString[m.Rcode]
	}
	q := m.Question[0]
	return q.Name + " " + dns.Type(q.Qtype).String() + ": " + dns.RcodeToString[m.Rcode] + ", " + strconv.Itoa(len(m.Answer)) + " records"
}
