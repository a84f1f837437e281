package kera.wire;

import java.io.EOFException;
import java.io.IOException;
import java.io.InterruptedIOException;
import java.net.InetAddress;
import java.net.InetSocketAddress;
import java.net.SocketAddress;
import java.net.StandardProtocolFamily;
import java.net.StandardSocketOptions;
import java.net.UnixDomainSocketAddress;
import java.nio.ByteBuffer;
import java.nio.channels.ClosedByInterruptException;
import java.nio.channels.SelectionKey;
import java.nio.channels.Selector;
import java.nio.channels.SocketChannel;
import java.security.GeneralSecurityException;
import java.util.ArrayDeque;
import java.util.Deque;
import java.util.concurrent.ExecutionException;
import java.util.concurrent.FutureTask;
import java.util.concurrent.TimeUnit;
import java.util.concurrent.TimeoutException;

import javax.net.ssl.SSLEngine;
import javax.net.ssl.SSLException;

import jdk.net.ExtendedSocketOptions;

/**
 * A connection that one thread uses at a time. Every wait is bounded, and ends if the thread is interrupted, with an
 * {@link InterruptedIOException} or a {@link ClosedByInterruptException}. Sending never waits: bytes that the peer does
 * not take yet are sent during later waits, so two ends that both send cannot block each other.
 */
final class Link implements Pool.Idle {

    /** After this time another socket tries: TCP itself would wait longer and longer between its attempts. */
    private static final long CONNECT_ATTEMPT_MS = 1_000;

    private final String address;
    private final SocketChannel channel;
    /** The access with which the connection was made. */
    private Access access = Access.OPEN;
    /** The encrypted channel; null if the connection is not encrypted. */
    private TlsChannel secured;
    private final Selector selector;
    private final SelectionKey key;
    private final Deque<ByteBuffer> unsent = new ArrayDeque<>();

    private Link(String address, SocketChannel channel) throws IOException {
        this.address = address;
        this.channel = channel;
        channel.configureBlocking(false);
        selector = Selector.open();
        try {
            key = channel.register(selector, SelectionKey.OP_CONNECT);
        } catch (IOException | RuntimeException error) {
            selector.close();
            throw error;
        }
    }

    static Link unix(String path, long timeoutMs) throws IOException {
        SocketAddress to = UnixDomainSocketAddress.of(path);
        return connect(path, SocketChannel.open(StandardProtocolFamily.UNIX), to, Deadline.afterMs(timeoutMs), null);
    }

    /** Connect to {@code host:port}, IPv6 hosts in brackets, by any address of the name. {@code tls} may be null. */
    static Link tcp(String address, long timeoutMs, Tls tls) throws IOException {
        int colon = address.lastIndexOf(':');
        String host = address.substring(0, Math.max(colon, 0)).replaceAll("^\\[(.*)]$", "$1");
        int port;
        try {
            port = Integer.parseInt(address.substring(colon + 1));
        } catch (NumberFormatException error) {
            port = -1;
        }
        if (host.isEmpty() || port < 0 || port > 0xFFFF) {
            throw new IOException("'" + address + "' is not an address (host:port)");
        }
        long deadline = Deadline.afterMs(timeoutMs);
        IOException failure = new IOException("cannot connect to " + address + ": it has no address");
        boolean silent;
        do {
            silent = false;
            for (InetAddress each : resolved(host, address, deadline)) {
                long attempt = Deadline.earlier(deadline, Deadline.afterMs(CONNECT_ATTEMPT_MS));
                try {
                    SSLEngine engine = tls == null ? null : tls.engine(host, port);
                    Link made = connect(address, watched(), new InetSocketAddress(each, port), attempt, engine);
                    return made;
                } catch (InterruptedIOException | ClosedByInterruptException error) {
                    throw error;
                } catch (IOException error) {
                    failure = error;
                    silent |= Deadline.passed(attempt);
                }
            }
        } while (silent && !Deadline.passed(deadline));
        throw failure;
    }

    /** The addresses of {@code host}. Another thread looks them up, because that can take long, and has no deadline. */
    private static InetAddress[] resolved(String host, String address, long deadline) throws IOException {
        FutureTask<InetAddress[]> task = new FutureTask<>(() -> InetAddress.getAllByName(host));
        Thread thread = new Thread(task, "kera-resolver");
        thread.setDaemon(true);
        thread.start();
        try {
            return task.get(Deadline.leftNanos(deadline), TimeUnit.NANOSECONDS);
        } catch (InterruptedException error) {
            Thread.currentThread().interrupt();
            throw new InterruptedIOException("interrupted while looking for " + host);
        } catch (TimeoutException error) {
            throw new IOException("cannot connect to " + address + ": its name was not resolved in time", error);
        } catch (ExecutionException error) {
            throw new IOException("cannot connect to " + address + ": no host of this name is known", error.getCause());
        }
    }

    /**
     * A socket with keep-alive probes, which the kernel sends if nothing arrives; see {@code kera.core.rpc.sockets}.
     *
     * <p>The kernel does not probe while sent data is not acknowledged, and Java has no TCP_USER_TIMEOUT: the deadline
     * of each call of {@link #receive} bounds that case.
     */
    private static SocketChannel watched() throws IOException {
        return SocketChannel.open().setOption(StandardSocketOptions.TCP_NODELAY, true)
                .setOption(StandardSocketOptions.SO_KEEPALIVE, true)
                .setOption(ExtendedSocketOptions.TCP_KEEPIDLE, 1)
                .setOption(ExtendedSocketOptions.TCP_KEEPINTERVAL, 1)
                .setOption(ExtendedSocketOptions.TCP_KEEPCOUNT, 3);
    }

    private static Link connect(String address, SocketChannel channel, SocketAddress to, long deadline,
            SSLEngine engine) throws IOException {
        Link link = null;
        try {
            link = new Link(address, channel);
            if (!channel.connect(to)) {
                while (!channel.finishConnect()) {
                    if (Deadline.passed(deadline)) {
                        throw new IOException("no connection in time");
                    }
                    link.await(SelectionKey.OP_CONNECT, deadline);
                }
            }
            if (engine != null) {
                link.secure(engine, deadline);
            }
            return link;
        } catch (InterruptedIOException | ClosedByInterruptException error) {
            abandon(link, channel);
            throw error;
        } catch (IOException error) {
            abandon(link, channel);
            throw new IOException("cannot connect to " + address + ": " + reason(error), error);
        }
    }

    private void secure(SSLEngine engine, long deadline) throws IOException {
        TlsChannel made = new TlsChannel(channel, engine);
        while (!made.shakeHands()) {
            if (Deadline.passed(deadline)) {
                throw new IOException("no handshake of TLS in time");
            }
            await(made.pending() ? SelectionKey.OP_READ | SelectionKey.OP_WRITE : SelectionKey.OP_READ, deadline);
        }
        secured = made;
    }

    /** The reason in words; the innermost of nested exceptions says what is wrong with the peer's certificate. */
    private static String reason(IOException error) {
        if (!(error instanceof SSLException)) {
            return error.getMessage();
        }
        Throwable cause = error;
        while (cause.getCause() != null) {
            cause = cause.getCause();
        }
        boolean certificate = cause instanceof GeneralSecurityException;
        return (certificate ? "its certificate is not accepted: " : "TLS failed: ") + cause.getMessage();
    }

    private static void abandon(Link link, SocketChannel channel) throws IOException {
        if (link != null) {
            link.close();
        } else {
            channel.close();
        }
    }

    String address() {
        return address;
    }

    /** The access with which the connection was made, see {@link #madeAs}. */
    Access access() {
        return access;
    }

    /** Note the access by which the peer knows this client. */
    void madeAs(Access shown) {
        access = shown;
    }

    /** Send the rest of {@code message}, now or during later waits. The caller must not change it. */
    void send(ByteBuffer message) throws IOException {
        unsent.addLast(message);
        flush();
    }

    private void flush() throws IOException {
        try {
            while (!unsent.isEmpty()) {
                if (secured == null) {
                    channel.write(unsent.peekFirst());
                } else {
                    secured.write(unsent.peekFirst());
                }
                if (unsent.peekFirst().hasRemaining()) {
                    return;
                }
                unsent.removeFirst();
            }
            if (secured != null) {
                secured.flush();
            }
        } catch (ClosedByInterruptException error) {
            throw error;
        } catch (IOException error) {
            throw lost(error.getMessage(), error);
        }
    }

    /** Wait until all is sent; return false if it is not by {@code deadline}. */
    boolean sent(long deadline) throws IOException {
        flush();
        while (sending() && !Deadline.passed(deadline)) {
            await(SelectionKey.OP_WRITE, deadline);
            flush();
        }
        return !sending();
    }

    private boolean sending() {
        return !unsent.isEmpty() || (secured != null && secured.pending());
    }

    private int read(ByteBuffer into) throws IOException {
        return secured == null ? channel.read(into) : secured.read(into);
    }

    private IOException lost(String reason, IOException cause) {
        return new IOException("connection to " + address + " was lost: " + reason, cause);
    }

    /** Read some bytes into {@code into}, which has room; return their number, 0 if none arrive by {@code deadline}. */
    int receive(ByteBuffer into, long deadline) throws IOException {
        while (true) {
            requireUninterrupted();
            flush();
            int count;
            try {
                count = read(into);
            } catch (ClosedByInterruptException error) {
                throw error;
            } catch (IOException error) {
                throw lost(error.getMessage(), error);
            }
            if (count < 0) {
                throw lost("closed", new EOFException());
            }
            if (count > 0) {
                return count;
            }
            if (Deadline.passed(deadline)) {
                return 0;
            }
            await(sending() ? SelectionKey.OP_READ | SelectionKey.OP_WRITE : SelectionKey.OP_READ, deadline);
        }
    }

    private void await(int operations, long deadline) throws IOException {
        key.interestOps(operations);
        selector.select(Math.max(1, TimeUnit.NANOSECONDS.toMillis(Deadline.leftNanos(deadline))));
        selector.selectedKeys().clear();
        requireUninterrupted();
    }

    private static void requireUninterrupted() throws InterruptedIOException {
        if (Thread.currentThread().isInterrupted()) {
            throw new InterruptedIOException("interrupted while waiting for a broker");
        }
    }

    @Override
    public boolean usable() {
        try {
            return !sending() && read(ByteBuffer.allocate(1)) == 0;
        } catch (IOException error) {
            return false;
        }
    }

    @Override
    public void close() {
        try {
            selector.close();
        } catch (IOException error) {
            // Nothing can be done about it.
        }
        try {
            channel.close();
        } catch (IOException error) {
            // Nothing can be done about it either.
        }
    }
}
