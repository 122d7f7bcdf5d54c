package main

import "context"

const (
	sharedAdd = "atomic add to one word"
	sharedCAS = "compare-and-swap of one word"
)

func program(ctx context.Context, o options) ([]Result, error) { return nil, nil }
