// SPDX-License-Identifier: Apache-2.0

package bench

import (
	"context"
	"log/slog"
	"time"

	"github.com/weft-mesh/weft/internal/datapath/pin"
	"github.com/weft-mesh/weft/internal/datapath/service"
	"github.com/weft-mesh/weft/internal/datapath/setting"
	"github.com/weft-mesh/weft/internal/netdev"
	"github.com/weft-mesh/weft/internal/services"
	"github.com/weft-mesh/weft/internal/state"
)

// followServices brings the tables into the maps, as the agent does, and returns
// once all that they have is there; then it follows them until ctx ends.
func followServices(ctx context.Context, maps *pin.Maps, tables *state.Tables, log *slog.Logger) error {
	net, err := netdev.Open()
	if err != nil {
		return err
	}
	writer, err := service.New(maps, service.Options{Maglev: true})
	if err != nil {
		return err
	}
	lifetimes := setting.Lifetimes{
		TCPSyn: time.Minute, TCPEstablished: 6 * time.Hour, TCPClosing: 10 * time.Second,
		UDP: 30 * time.Second, UDPReplied: time.Minute, Other: 30 * time.Second,
	}
	driver, err := services.New(services.Config{
		Node: nodeName, Tables: tables, Writer: writer, Reader: service.NewReader(maps, writer),
		Connections: service.NewConnections(maps, lifetimes), Cutter: net, Log: log,
	})
	if err != nil {
		return err
	}
	if err := driver.Apply(); err != nil {
		return err
	}
	go func() {
		if err := driver.Run(ctx); err != nil {
			log.Error("services are not followed any more", "err", err)
		}
		net.Close()
	}()
	return nil
}
