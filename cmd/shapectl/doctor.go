package main

import "github.com/spf13/cobra"

func (e *env) doctorCommand() *cobra.Command { return &cobra.Command{Use: "doctor [DEV]"} }
