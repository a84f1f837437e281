package kera

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"net"
	"sync"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/metadata"

	kerav1 "kera.example/client/kera/v1"
)

// Config says how a cluster is reached. Zero values have defaults.
type Config struct {
	// Coordinators are addresses, host:port, of which one is enough.
	Coordinators []string
	// TLS, if daemons speak that; nil: they do not.
	TLS *tls.Config
	// Token is shown with each call; needs TLS. Empty: none.
	Token string
	// RequestTimeout is how long an answer may take; 10 s. A read that waits for records may take longer by its wait.
	RequestTimeout time.Duration
	// RetryTimeout is how long something is tried again that fails for a time, as during a recovery; a minute.
	RetryTimeout time.Duration
}

// Client has the connections to a cluster, for any number of producers and consumers.
type Client struct {
	config Config

	mu     sync.Mutex
	peers  map[string]*peer
	leader string
	closed bool
}

// Connect finds the coordinator that leads. It fails when there is none within the retry timeout, or ctx is done.
func Connect(ctx context.Context, config Config) (*Client, error) {
	if len(config.Coordinators) == 0 {
		return nil, errors.New("no address of a coordinator is given")
	}
	for _, address := range config.Coordinators {
		if _, _, err := net.SplitHostPort(address); err != nil {
			return nil, fmt.Errorf("%q is not a coordinator address: %w", address, err)
		}
	}
	if config.Token != "" && config.TLS == nil {
		return nil, errors.New("a token is shown over TLS only")
	}
	if config.RequestTimeout <= 0 {
		config.RequestTimeout = 10 * time.Second
	}
	if config.RetryTimeout <= 0 {
		config.RetryTimeout = time.Minute
	}
	c := &Client{config: config, peers: map[string]*peer{}}
	if _, err := c.describeCluster(ctx); err != nil {
		_ = c.Close()
		return nil, fmt.Errorf("cannot connect to a coordinator: %w", err)
	}
	return c, nil
}

// Close ends all connections. Producers and consumers are to be closed before.
func (c *Client) Close() error {
	c.mu.Lock()
	peers := c.peers
	c.peers, c.closed = map[string]*peer{}, true
	c.mu.Unlock()
	var all error
	for _, each := range peers {
		all = errors.Join(all, each.close())
	}
	return all
}

func (c *Client) describeCluster(ctx context.Context) (*kerav1.DescribeClusterResponse, error) {
	return askCoordinator(ctx, c, kerav1.CoordinatorClient.DescribeCluster, &kerav1.DescribeClusterRequest{})
}

func (c *Client) describeStream(
	ctx context.Context, request *kerav1.DescribeStreamRequest,
) (*kerav1.DescribeStreamResponse, error) {
	return askCoordinator(ctx, c, kerav1.CoordinatorClient.DescribeStream, request)
}

// askCoordinator asks the one that leads, wherever that is, and tries again while none does.
func askCoordinator[Request, Response any](
	ctx context.Context,
	c *Client,
	method func(kerav1.CoordinatorClient, context.Context, *Request, ...grpc.CallOption) (*Response, error),
	request *Request,
) (*Response, error) {
	trying, cancel := context.WithTimeout(ctx, c.config.RetryTimeout)
	defer cancel()
	var pause pauses
	for attempt := 0; ; attempt++ {
		address := c.coordinator(attempt)
		response, err := askOnce(trying, c, address, method, request)
		if err == nil {
			c.setLeader(address)
			return response, nil
		}
		var known *Error
		leads := ""
		if errors.As(err, &known) && known.Code == codeNotLeader {
			known.Attribute("leader", &leads)
		}
		c.setLeader(leads)
		if leads != "" && leads != address && attempt < 8 {
			continue
		}
		if CodeOf(err) != codeNotLeader && !temporary(err) {
			return nil, err
		}
		if pause.wait(trying, "") != nil {
			if ctx.Err() != nil {
				return nil, fmt.Errorf("coordinator %s: %w, after: %w", address, ctx.Err(), err)
			}
			return nil, fmt.Errorf("coordinator %s: %w", address, err)
		}
	}
}

func askOnce[Request, Response any](
	ctx context.Context,
	c *Client,
	address string,
	method func(kerav1.CoordinatorClient, context.Context, *Request, ...grpc.CallOption) (*Response, error),
	request *Request,
) (*Response, error) {
	ctx, cancel := context.WithTimeout(ctx, c.config.RequestTimeout)
	defer cancel()
	to, err := c.peer(address)
	if err != nil {
		return nil, err
	}
	var trailer metadata.MD
	response, err := method(to.coordinator, ctx, request, grpc.Trailer(&trailer))
	return response, errorOfCall(err, trailer)
}

// coordinator is whom to ask: who leads, as far as that is known, else each in turn.
func (c *Client) coordinator(attempt int) string {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.leader != "" {
		return c.leader
	}
	return c.config.Coordinators[attempt%len(c.config.Coordinators)]
}

func (c *Client) setLeader(address string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.leader = address
}

// peer is the connection to an address.
func (c *Client) peer(address string) (*peer, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.closed {
		return nil, errors.New("the client is closed")
	}
	if there := c.peers[address]; there != nil {
		return there, nil
	}
	made, err := newPeer(address, &c.config)
	if err != nil {
		return nil, fmt.Errorf("address %q: %w", address, err)
	}
	c.peers[address] = made
	return made, nil
}

// reach is the connection to a broker, by its id.
func (c *Client) reach(l *layout, brokerID uint32) (*peer, error) {
	broker := l.brokers[brokerID]
	if broker.GetGrpcAddress() == "" {
		return nil, &Error{Code: codeUnavailable, Message: fmt.Sprintf("broker %d has no address now", brokerID)}
	}
	return c.peer(broker.GetGrpcAddress())
}
