// SPDX-License-Identifier: Apache-2.0

package names

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"time"

	"github.com/miekg/dns"
)

// AskConfig says what to ask whom.
type AskConfig struct {
	Name       string // also an address, for its names
	Type       string // such as "A"
	Server     string // ADDRESS or IP:PORT; empty for those of ResolvConf
	ResolvConf string // file
	TCP        bool   // by TCP alone
	Timeout    time.Duration
}

// Ask looks a name up as a resolver does: the names of the search list in order,
// of each server in order, until one has records. It returns these as text.
func Ask(ctx context.Context, cfg AskConfig) ([]string, error) {
	qtype, ok := dns.StringToType[cfg.Type]
	if !ok {
		return nil, fmt.Errorf("type %q: want a type of DNS records such as A, AAAA or SRV", cfg.Type)
	}
	conf, err := dns.ClientConfigFromFile(cfg.ResolvConf)
	if err != nil {
		return nil, fmt.Errorf("read %s: %w", cfg.ResolvConf, err)
	}
	if cfg.Server != "" {
		conf.Servers = []string{cfg.Server}
	}
	candidates := conf.NameList(cfg.Name)
	if _, err := netip.ParseAddr(cfg.Name); err == nil {
		reverse, err := dns.ReverseAddr(cfg.Name)
		if err != nil {
			return nil, err
		}
		candidates, qtype = []string{reverse}, dns.TypePTR
	}
	if len(conf.Servers) == 0 {
		return nil, fmt.Errorf("%s names no server", cfg.ResolvConf)
	}
	var none error
	for _, name := range candidates {
		records, err := askAll(ctx, cfg, conf.Servers, name, qtype)
		switch {
		case err == nil:
			return records, nil
		case !errors.Is(err, errNone): // nobody answers: not for the rest either
			return nil, errors.Join(none, err)
		}
		none = errors.Join(none, err)
	}
	return nil, none
}

// errNone is an answer without records.
var errNone = errors.New("no such record")

// askAll asks one server after the other until one answers.
func askAll(ctx context.Context, cfg AskConfig, servers []string, name string, qtype uint16) ([]string, error) {
	var errs error
	for _, server := range servers {
		if _, err := netip.ParseAddrPort(server); err != nil {
			server = net.JoinHostPort(server, "53")
		}
		m, err := askOne(ctx, cfg, server, name, qtype)
		switch {
		case err != nil:
			errs = errors.Join(errs, fmt.Errorf("ask %s for %s: %w", server, name, err))
		case m.Rcode == dns.RcodeServerFailure || m.Rcode == dns.RcodeRefused:
			errs = errors.Join(errs, fmt.Errorf("ask %s for %s: %s", server, name, dns.RcodeToString[m.Rcode]))
		case len(m.Answer) == 0:
			return nil, fmt.Errorf("%s %s: %w: %s", name, dns.Type(qtype), errNone, dns.RcodeToString[m.Rcode])
		default:
			var records []string
			for _, rr := range m.Answer {
				records = append(records, rr.String())
			}
			return records, nil
		}
	}
	return nil, errs
}

func askOne(ctx context.Context, cfg AskConfig, server, name string, qtype uint16) (*dns.Msg, error) {
	m := new(dns.Msg)
	m.SetQuestion(name, qtype)
	m.SetEdns0(maxUDP, false)
	client := &dns.Client{Net: "udp", Timeout: cfg.Timeout}
	if !cfg.TCP {
		answer, _, err := client.ExchangeContext(ctx, m, server)
		if err != nil || !answer.Truncated {
			return answer, err
		}
	}
	client.Net = "tcp"
	answer, _, err := client.ExchangeContext(ctx, m, server)
	return answer, err
}
