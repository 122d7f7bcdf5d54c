// Package step marks the steps of a command that can fail or that others can see.
// A test can let each step fail, or end the process before it.
package step

// Hook, if set by a test, is called before each step. A step with canFail fails with the error that it returns.
var Hook func(what string, canFail bool) error

// Try is called before a step that can fail. It returns the error of Hook.
func Try(what string) error {
	if Hook == nil {
		return nil
	}
	return Hook(what, true)
}

// Store is called before a store to memory that packets or later commands read.
func Store(what string) {
	if Hook != nil {
		Hook(what, false)
	}
}
