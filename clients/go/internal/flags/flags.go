// Package flags has what the commands share: how a cluster is reached.
package flags

import (
	"crypto/tls"
	"crypto/x509"
	"flag"
	"fmt"
	"os"
	"strings"
	"time"

	"kera.example/client/kera"
)

// Cluster is the flags that say how one is reached.
type Cluster struct {
	bootstrap, ca, cert, key, tokenFile *string
	timeout                             *time.Duration
}

// Add has the flags parsed.
func Add() *Cluster {
	return &Cluster{
		bootstrap: flag.String("bootstrap", "127.0.0.1:7400", "addresses of coordinators, `host:port,…`"),
		ca:        flag.String("tls-ca", "", "speak TLS, and trust the authorities in this `file`"),
		cert:      flag.String("tls-cert", "", "`file` with a certificate of one's own, for -tls-ca"),
		key:       flag.String("tls-key", "", "`file` with its key"),
		tokenFile: flag.String("token-file", "", "`file` with a token to show"),
		timeout:   flag.Duration("timeout", time.Minute, "how long something that fails for a time is tried again"),
	}
}

// Config is what they say.
func (c *Cluster) Config() (kera.Config, error) {
	config := kera.Config{Coordinators: strings.Split(*c.bootstrap, ","), RetryTimeout: *c.timeout}
	if *c.ca != "" {
		pem, err := os.ReadFile(*c.ca)
		if err != nil {
			return config, err
		}
		config.TLS = &tls.Config{RootCAs: x509.NewCertPool(), MinVersion: tls.VersionTLS12}
		if !config.TLS.RootCAs.AppendCertsFromPEM(pem) {
			return config, fmt.Errorf("%s has no certificate", *c.ca)
		}
	}
	if *c.cert != "" || *c.key != "" {
		if config.TLS == nil {
			return config, fmt.Errorf("-tls-cert and -tls-key need -tls-ca")
		}
		pair, err := tls.LoadX509KeyPair(*c.cert, *c.key)
		if err != nil {
			return config, err
		}
		config.TLS.Certificates = []tls.Certificate{pair}
	}
	if *c.tokenFile != "" {
		token, err := os.ReadFile(*c.tokenFile)
		if err != nil {
			return config, err
		}
		config.Token = strings.TrimSpace(string(token))
	}
	return config, nil
}
