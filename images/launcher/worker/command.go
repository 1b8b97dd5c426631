package main

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"os/signal"
	"slices"
	"strings"
	"sync"
	"syscall"
)

const exitNotFound = 127

// probe succeeds where the image's Python has no elastic_runtime of its own, which would be preferred.
const probe = `import importlib.machinery, sys
sys.exit(importlib.machinery.PathFinder.find_spec("elastic_runtime") is not None)`

// ending are the signals that ask for an end.
var ending = []syscall.Signal{syscall.SIGTERM, syscall.SIGINT, syscall.SIGHUP, syscall.SIGQUIT}

// signals ends the program when one arrives, or passes it on to the step's command while that runs.
type signals struct {
	lock    sync.Mutex
	phase   string
	command int            // the process of the command, 0 while there is none
	passed  syscall.Signal // the last signal passed on that asks the command to end
}

func handleSignals() *signals {
	handled := &signals{phase: "starting"}
	received := make(chan os.Signal, 16)
	signal.Notify(received, syscall.SIGTERM, syscall.SIGINT, syscall.SIGHUP, syscall.SIGQUIT,
		syscall.SIGUSR1, syscall.SIGUSR2, syscall.SIGWINCH, syscall.SIGCONT)
	go func() {
		for one := range received {
			handled.handle(one.(syscall.Signal))
		}
	}()
	return handled
}

func (s *signals) handle(number syscall.Signal) {
	s.lock.Lock()
	defer s.lock.Unlock()
	ends := slices.Contains(ending, number)
	if s.command != 0 {
		if ends {
			s.passed = number
		}
		_ = syscall.Kill(s.command, number)
	} else if ends {
		fail(128+int(number), s.stopped(number))
	}
}

func (s *signals) stopped(number syscall.Signal) error {
	return fmt.Errorf("stopped by signal %d (%v) while %s", int(number), number, s.phase)
}

// enter sets what the program does, for the message of its end.
func (s *signals) enter(phase string) {
	s.lock.Lock()
	defer s.lock.Unlock()
	s.phase = phase
}

// start starts a process, to which signals are passed on.
func (s *signals) start(path string, argv []string) (int, error) {
	s.lock.Lock() // a signal waits until there is a process to receive it
	defer s.lock.Unlock()
	attributes := &syscall.ProcAttr{Env: os.Environ(), Files: []uintptr{0, 1, 2}}
	pid, err := syscall.ForkExec(path, argv, attributes)
	if err == nil {
		s.command, s.phase = pid, "running the step's command"
	}
	return pid, err
}

// await returns the exit code of a process, and collects all other processes that end meanwhile, whose parents have ended.
func (s *signals) await(pid int) int {
	for {
		var status syscall.WaitStatus
		got, err := syscall.Wait4(-1, &status, 0, nil)
		if err == syscall.EINTR || (err == nil && got != pid) {
			continue
		}
		s.lock.Lock()
		s.command = 0
		passed := s.passed
		s.lock.Unlock()
		if passed != 0 && status.ExitStatus() != 0 {
			fmt.Fprintf(os.Stderr, "gpuquota: %v\n", s.stopped(passed))
		}
		switch {
		case err != nil:
			return 1
		case status.Signaled():
			return 128 + int(status.Signal())
		}
		return status.ExitStatus()
	}
}

// execute runs the step's command and returns its exit code: 127 where there is no such program, as in a shell.
func execute(signals *signals, argv []string) int {
	pid, err := 0, errors.New("the command is empty")
	if len(argv) > 0 {
		var path string
		if path, err = found(argv[0]); err == nil {
			pid, err = signals.start(path, argv)
		}
	}
	if err != nil {
		fmt.Fprintf(os.Stderr, "gpuquota: cannot run %q: %v\n", strings.Join(argv, " "), err)
		return exitNotFound
	}
	return signals.await(pid)
}

// found returns the path of a program, also of one in the working folder, where PATH names that.
func found(name string) (string, error) {
	path, err := exec.LookPath(name)
	var failed *exec.Error
	if errors.Is(err, exec.ErrDot) {
		return path, nil
	}
	if errors.As(err, &failed) {
		err = failed.Err
	}
	return path, err
}

// addRuntime adds elastic_runtime to the environment of the command, where there is a Python that lacks it.
func addRuntime(modules string) {
	if _, err := os.Stat(modules); err != nil {
		return
	}
	python, err := found("python3")
	if err != nil || exec.Command(python, "-c", probe).Run() != nil {
		return
	}
	if own := os.Getenv("PYTHONPATH"); own != "" {
		modules += string(os.PathListSeparator) + own
	}
	_ = os.Setenv("PYTHONPATH", modules)
}
