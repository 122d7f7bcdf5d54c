// Command shapectl-kubernetes changes the limits of pods on one node when their annotations change. It is no part of 'shapectl serve',
// as the client of Kubernetes would make that twice as large.
package main

import (
	"context"
	"flag"
	"log"
	"os"
	"os/signal"
	"syscall"
	"time"

	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"

	"github.com/shapectl/shapectl/pkg/loader"
)

func main() {
	log.SetFlags(0)
	f := follower{
		node:    os.Getenv("NODE_NAME"),
		options: loader.Options{BPFFS: os.Getenv("SHAPECTL_BPFFS"), SetupFQ: true, Patience: time.Minute},
		telling: map[string]string{},
	}
	flag.BoolVar(&f.cluster, "cluster", false, "the limit of a namespace is for all nodes together; on each, 'shapectl serve' needs a store")
	flag.Parse()
	if f.node == "" || flag.NArg() > 0 {
		log.Fatal("usage: NODE_NAME=NODE shapectl-kubernetes [--cluster]; NODE is the name of this node in Kubernetes")
	}
	config, err := rest.InClusterConfig()
	if err != nil {
		log.Fatal("connect to Kubernetes: ", err)
	}
	client, err := kubernetes.NewForConfig(config)
	if err != nil {
		log.Fatal("connect to Kubernetes: ", err)
	}
	log.Print("connecting to ", config.Host)
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM)
	defer stop()
	if err := f.run(ctx, client); err != nil {
		log.Fatal(err)
	}
}
