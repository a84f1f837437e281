package kera.wire;

import java.io.IOException;
import java.nio.ByteBuffer;
import java.nio.channels.ByteChannel;
import java.nio.channels.SocketChannel;

import javax.net.ssl.SSLEngine;
import javax.net.ssl.SSLEngineResult;
import javax.net.ssl.SSLEngineResult.HandshakeStatus;
import javax.net.ssl.SSLException;

/** A TLS connection that never waits: a read or a write that would have to wait for the peer returns 0. */
final class TlsChannel implements ByteChannel {

    private static final ByteBuffer NOTHING = ByteBuffer.allocate(0);

    private final SocketChannel channel;
    private final SSLEngine engine;
    /** Received, encrypted bytes, from the position to the limit. */
    private ByteBuffer arrived;
    /** Encrypted bytes to be sent, from the position to the limit. */
    private ByteBuffer leaving;
    /** Decrypted bytes that have not been read, from the position to the limit. */
    private ByteBuffer plain;
    private boolean ended;

    TlsChannel(SocketChannel channel, SSLEngine engine) throws SSLException {
        this.channel = channel;
        this.engine = engine;
        arrived = ByteBuffer.allocate(engine.getSession().getPacketBufferSize()).flip();
        leaving = ByteBuffer.allocate(engine.getSession().getPacketBufferSize()).flip();
        plain = ByteBuffer.allocate(engine.getSession().getApplicationBufferSize()).flip();
        engine.beginHandshake();
    }

    /** Continue the handshake as far as possible without waiting; return whether it is complete. */
    boolean shakeHands() throws IOException {
        while (true) {
            if (!flush()) {
                return false;
            }
            switch (engine.getHandshakeStatus()) {
                case NOT_HANDSHAKING, FINISHED -> {
                    return true;
                }
                case NEED_TASK -> runTasks();
                case NEED_WRAP -> wrap(NOTHING);
                default -> {
                    if (!unwrap()) {
                        if (ended) {
                            throw new SSLException("the peer ended the handshake");
                        }
                        return false;
                    }
                }
            }
        }
    }

    /** Whether bytes wait to be sent. */
    boolean pending() {
        return leaving.hasRemaining();
    }

    /** Send waiting bytes as far as the peer takes them; return whether all are sent. */
    boolean flush() throws IOException {
        while (leaving.hasRemaining()) {
            if (channel.write(leaving) == 0) {
                return false;
            }
        }
        return true;
    }

    @Override
    public int write(ByteBuffer from) throws IOException {
        int before = from.remaining();
        while (from.hasRemaining() && settled() && flush()) {
            wrap(from);
        }
        flush();
        return before - from.remaining();
    }

    @Override
    public int read(ByteBuffer into) throws IOException {
        while (!plain.hasRemaining()) {
            if (!settled()) {
                return 0;
            }
            if (!unwrap()) {
                return ended ? -1 : 0;
            }
        }
        int count = Math.min(plain.remaining(), into.remaining());
        into.put(plain.slice(plain.position(), count));
        plain.position(plain.position() + count);
        return count;
    }

    /** Handle a key renewal after the handshake; return false if bytes for it have to be sent first. */
    private boolean settled() throws IOException {
        while (true) {
            HandshakeStatus status = engine.getHandshakeStatus();
            if (status == HandshakeStatus.NEED_TASK) {
                runTasks();
            } else if (status != HandshakeStatus.NEED_WRAP) {
                return true;
            } else if (flush()) {
                wrap(NOTHING);
            } else {
                return false;
            }
        }
    }

    private void runTasks() {
        for (Runnable task = engine.getDelegatedTask(); task != null; task = engine.getDelegatedTask()) {
            task.run();
        }
    }

    /** Encrypt one record into {@code leaving}, which must be empty. */
    private void wrap(ByteBuffer from) throws IOException {
        leaving.clear();
        SSLEngineResult result = engine.wrap(from, leaving);
        while (result.getStatus() == SSLEngineResult.Status.BUFFER_OVERFLOW) {
            leaving = ByteBuffer.allocate(engine.getSession().getPacketBufferSize());
            result = engine.wrap(from, leaving);
        }
        leaving.flip();
        if (result.getStatus() == SSLEngineResult.Status.CLOSED && from.hasRemaining()) {
            throw new SSLException("the connection is closed");
        }
    }

    /** Decrypt one record, or process a handshake record; false if more bytes must arrive first, or the peer ended. */
    private boolean unwrap() throws IOException {
        while (true) {
            plain.clear();
            SSLEngineResult result;
            try {
                result = engine.unwrap(arrived, plain);
            } finally {
                plain.flip();
            }
            switch (result.getStatus()) {
                case OK -> {
                    return true;
                }
                case CLOSED -> {
                    ended = true;
                    return false;
                }
                case BUFFER_OVERFLOW -> plain = ByteBuffer.allocate(engine.getSession().getApplicationBufferSize())
                        .flip();
                default -> {
                    if (!more()) {
                        return false;
                    }
                }
            }
        }
    }

    /** Read more encrypted bytes; return whether any have arrived. */
    private boolean more() throws IOException {
        if (arrived.capacity() - arrived.remaining() == 0) {
            arrived = ByteBuffer.allocate(2 * arrived.capacity()).put(arrived).flip();
        }
        arrived.compact();
        int count;
        try {
            count = channel.read(arrived);
        } finally {
            arrived.flip();
        }
        ended |= count < 0;
        return count > 0;
    }

    @Override
    public boolean isOpen() {
        return channel.isOpen();
    }

    /** Close without a TLS close message: frames have lengths, so a truncated frame is noticed anyway. */
    @Override
    public void close() throws IOException {
        channel.close();
    }
}
