package kera.wire;

import java.io.IOException;
import java.nio.ByteBuffer;
import java.nio.channels.ByteChannel;
import java.nio.channels.SocketChannel;

import javax.net.ssl.SSLEngine;
import javax.net.ssl.SSLEngineResult;
import javax.net.ssl.SSLEngineResult.HandshakeStatus;
import javax.net.ssl.SSLException;

/** A connection over TLS that never waits: a read or a write that has to wait for the peer gives 0. */
final class TlsChannel implements ByteChannel {

    private static final ByteBuffer NOTHING = ByteBuffer.allocate(0);

    private final SocketChannel channel;
    private final SSLEngine engine;
    /** What has come, encrypted; from its position on to be read. */
    private ByteBuffer arrived;
    /** What is to go out, encrypted; likewise. */
    private ByteBuffer leaving;
    /** What was decrypted and not taken; likewise. */
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

    /** Go on with the handshake, as far as that needs no waiting; whether it is over. */
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

    /** Whether something waits to be sent. */
    boolean pending() {
        return leaving.hasRemaining();
    }

    /** Send what waits, as far as the peer takes it; whether all is sent. */
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

    /** After the handshake: keys are renewed in between. False: what that needs has to be sent first. */
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

    /** Encrypt one record; {@code leaving} is empty. */
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

    /** Decrypt one record, or do what the handshake has it for; false: more has to come first, or nothing will. */
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

    /** Whether more has come. */
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

    /** Without a farewell: frames have an end of their own, so nobody can cut one short unnoticed. */
    @Override
    public void close() throws IOException {
        channel.close();
    }
}
