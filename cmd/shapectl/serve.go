package main

import (
	"context"
	"fmt"
	"os"
	"os/signal"
	"strings"
	"syscall"

	"github.com/spf13/cobra"

	"github.com/shapectl/shapectl/internal/sandbox"
	"github.com/shapectl/shapectl/internal/serve"
)

// serveOptions are the flags of serve.
type serveOptions struct {
	file, lastGood string
	listen         string
	anyNetns       bool
	serve.Options
}

func serveCommand(e *env) *cobra.Command {
	o := serveOptions{Options: serve.Options{SocketGID: -1}}
	cmd := &cobra.Command{
		Use:   "serve [FILE] [flags]",
		Short: "Serve a web page, metrics and an API",
		Long: `Serve an API over HTTP, until it is stopped. The rules stay in force.

With FILE, it also does what 'shapectl watch' does.`,
		Example:           `  shapectl serve /etc/shapectl/policy.yaml`,
		Args:              args(0, 1),
		ValidArgsFunction: completePolicy,
		RunE: func(cmd *cobra.Command, given []string) error {
			if len(given) > 0 {
				o.file = given[0]
			}
			if o.listen != "none" {
				o.Listen = o.listen
			}
			return e.serve(o)
		},
	}
	f := cmd.Flags()
	f.StringVar(&o.Socket, "socket", "/run/shapectl/serve.sock", "listen on this Unix socket: a `path`")
	f.StringVar(&o.listen, "listen", "127.0.0.1:9824", "listen on this TCP `address`, or none")
	f.StringSliceVar(&o.Hosts, "host", nil, "a `name` by which clients may call this server, besides localhost")
	f.StringVar(&o.TokenFile, "token-file", "", "the `file` with the token that permits changes over TCP")
	f.StringVar(&o.Cert, "tls-cert", "", "use TLS with the certificate in this `file`")
	f.StringVar(&o.Key, "tls-key", "", "the `file` with its private key")
	f.BoolVar(&o.anyNetns, "any-netns", false, "requests may name another network namespace")
	e.addSetupFQ(f)
	f.StringVar(&o.lastGood, "last-good", "", "use the policy in this `file` while FILE is not valid, or was not confirmed")
	return cmd
}

// newServer makes the server with all its parts.
func (e *env) newServer(o serveOptions) (*serve.Server, error) {
	s, err := serve.New(o.Options)
	if err != nil {
		return nil, err
	}
	a := &api{env: e, anyNetns: o.anyNetns, say: o.Say}
	a.addTo(s)
	s.Handle("GET /api/v1/sandbox", serve.Reads, sandbox.Handler())
	s.Handle("POST /api/v1/sandbox", serve.Reads, sandbox.Handler())
	return s, nil
}

func (e *env) serve(o serveOptions) error {
	o.Say = func(text string) {
		for line := range strings.Lines(text) {
			e.say("shapectl: serve: %s", line)
		}
	}
	s, err := e.newServer(o)
	if err != nil {
		return inputf("serve: %w", err)
	}
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM)
	defer stop()
	reread := make(chan os.Signal, 1)
	signal.Notify(reread, syscall.SIGHUP)
	defer signal.Stop(reread)
	err = s.Run(ctx, func() {
		o.Say("listening")
		e.notify("READY=1")
	})
	if err != nil {
		return fmt.Errorf("serve: %w", err)
	}
	e.notify("STOPPING=1")
	return nil
}
