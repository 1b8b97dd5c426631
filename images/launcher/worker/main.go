// Command gpuquota-worker runs the command of a pipeline's step in a worker's pod, in whatever image the step has.
//
// The launcher's image brings it. An init container copies it to a volume of the worker's pod (install), and the pod's
// container starts it in place of the step's command (run): it is static, so the image needs neither Python nor a shell.
// It downloads the step's inputs from the relay in the launcher's pod, runs the command, and uploads its outputs. What to
// download, run and upload is the relay's answer; this program contains nothing of Kubeflow Pipelines.
//
// It is process 1 of its container, to which the kernel delivers only signals that it handles. So its handlers come
// first: a signal ends it in any phase but that of the command, to which it is passed on.
package main

import (
	"errors"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"syscall"
	"time"
)

const (
	usage = `usage: gpuquota-worker install FOLDER    copy this program, and elastic_runtime, to a folder
       gpuquota-worker run [options] FOLDER   run a step; the folder has the relay's url, token and ca.crt`

	// ended is the last line of a worker's log, followed by the exit code: a reader of the log need not wait for the end of
	// the pod. kfp_gpuquota/dsl/launcher/log_stream.py reads it.
	ended = "gpuquota: the step's command has ended with exit code "

	program        = "gpuquota-worker"
	runtime        = "runtime"
	podName        = "GPUQUOTA_POD_NAME"
	exitUsage      = 2
	terminationLog = "/dev/termination-log"
)

func main() {
	events := handleSignals()
	if len(os.Args) < 2 {
		fail(exitUsage, errors.New(usage))
	}
	switch options := os.Args[2:]; os.Args[1] {
	case "install":
		if len(options) != 1 {
			fail(exitUsage, errors.New(usage))
		}
		if err := install(options[0]); err != nil {
			fail(1, err)
		}
	case "run":
		flags := flag.NewFlagSet("run", flag.ExitOnError)
		patience := flags.Duration("timeout", 15*time.Minute, "how long the relay may not answer")
		modules := flags.String("runtime", beside(runtime), "folder or zip with elastic_runtime, for images without it")
		_ = flags.Parse(options)
		if flags.NArg() != 1 {
			fail(exitUsage, errors.New(usage))
		}
		code, err := run(events, newRelay(flags.Arg(0), *patience), *modules)
		if err != nil {
			fail(1, err)
		}
		fmt.Printf("%s%d\n", ended, code)
		os.Exit(code)
	default:
		fail(exitUsage, errors.New(usage))
	}
}

// run returns the exit code of the step's command.
func run(signals *signals, relay *relay, modules string) (int, error) {
	worker := os.Getenv(podName)
	if worker == "" {
		return 0, fmt.Errorf("%s is not set", podName)
	}
	signals.enter("waiting for the step's launcher")
	work, err := relay.work(worker)
	if err != nil {
		return 0, err
	}
	signals.enter("downloading the step's inputs")
	if err := fetch(relay, work.Inputs); err != nil {
		return 0, err
	}
	for _, folder := range work.Outputs {
		if err := os.MkdirAll(folder, 0o777); err != nil {
			return 0, fmt.Errorf("the folder of an output cannot be created: %w", err)
		}
	}
	signals.enter("starting the step's command")
	addRuntime(modules)
	code := execute(signals, work.Argv)
	if code != 0 {
		return code, nil
	}
	signals.enter("uploading the step's outputs")
	elsewhere, err := withCustomPaths(work)
	if err != nil {
		return 0, err
	}
	return code, send(relay, worker, work.Outputs, elsewhere)
}

// install copies this program, and elastic_runtime where the image has it beside this program, for all users.
func install(folder string) error {
	syscall.Umask(0o022)
	content, err := os.ReadFile("/proc/self/exe")
	if err != nil {
		return err
	}
	target := filepath.Join(folder, program)
	if err := os.WriteFile(target+".part", content, 0o755); err != nil {
		return err
	}
	if err := os.Rename(target+".part", target); err != nil {
		return err
	}
	modules := filepath.Join(folder, runtime)
	if err := os.RemoveAll(modules); err != nil { // of an init container that was started again
		return err
	}
	if _, err := os.Stat(beside(runtime)); err != nil {
		return nil
	}
	return os.CopyFS(modules, os.DirFS(beside(runtime)))
}

// beside returns a path in the folder of this program, or in that above it where the program lies in "bin".
func beside(name string) string {
	own, err := os.Executable()
	if err != nil {
		return name
	}
	folder := filepath.Dir(own)
	if filepath.Base(folder) == "bin" {
		folder = filepath.Dir(folder)
	}
	return filepath.Join(folder, name)
}

// fail ends the program. Kubernetes shows the message as the container's.
func fail(code int, err error) {
	message := fmt.Sprintf("gpuquota: %v\n", err)
	fmt.Fprint(os.Stderr, message)
	if file, err := os.OpenFile(terminationLog, os.O_WRONLY|os.O_TRUNC, 0); err == nil {
		_, _ = file.WriteString(message)
		_ = file.Close()
	}
	os.Exit(code)
}
