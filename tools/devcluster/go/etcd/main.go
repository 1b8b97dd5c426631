// Command etcd is the upstream server under the name that everybody knows: `go install` would call it "server".
package main

import (
	"os"

	"go.etcd.io/etcd/server/v3/etcdmain"
)

func main() { etcdmain.Main(os.Args) }
