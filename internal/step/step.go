// Package step marks what a command does that others can see, or that can fail:
// a test can let it fail, or end the process, at each of these steps.
package step

// Hook, if a test has set it, is called ahead of each step. Those that can fail do so with the error that it returns.
var Hook func(what string, canFail bool) error

// Try is called ahead of a step that can fail.
func Try(what string) error {
	if Hook == nil {
		return nil
	}
	return Hook(what, true)
}

// Store is called ahead of a store to memory that packets or later commands read.
func Store(what string) {
	if Hook != nil {
		Hook(what, false)
	}
}
