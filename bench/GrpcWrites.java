import com.google.protobuf.ByteString;
import com.google.protobuf.UnsafeByteOperations;
import com.sun.management.OperatingSystemMXBean;
import io.grpc.CallOptions;
import io.grpc.ManagedChannel;
import io.grpc.MethodDescriptor;
import io.grpc.netty.shaded.io.grpc.netty.NettyChannelBuilder;
import io.grpc.protobuf.ProtoUtils;
import io.grpc.stub.ClientCalls;
import io.grpc.stub.StreamObserver;
import java.lang.management.ManagementFactory;
import java.nio.ByteBuffer;
import java.nio.ByteOrder;
import java.nio.file.Files;
import java.nio.file.Path;
import java.util.ArrayDeque;
import java.util.Arrays;
import java.util.Locale;
import java.util.concurrent.ArrayBlockingQueue;
import java.util.zip.CRC32C;
import kera.v1.BrokerOuterClass.MultiWriteChunksRequest;
import kera.v1.BrokerOuterClass.MultiWriteChunksResponse;

/** The client of grpc_writes.py in Java: its arguments and its result are those of the one in Python. */
public final class GrpcWrites {
    private static final MethodDescriptor<MultiWriteChunksRequest, MultiWriteChunksResponse> METHOD =
            MethodDescriptor.<MultiWriteChunksRequest, MultiWriteChunksResponse>newBuilder()
                    .setType(MethodDescriptor.MethodType.BIDI_STREAMING)
                    .setFullMethodName("kera.v1.Broker/MultiWriteChunks")
                    .setRequestMarshaller(ProtoUtils.marshaller(MultiWriteChunksRequest.getDefaultInstance()))
                    .setResponseMarshaller(ProtoUtils.marshaller(MultiWriteChunksResponse.getDefaultInstance()))
                    .build();

    private GrpcWrites() {}

    public static void main(String[] argv) throws Exception {
        byte[] template = Files.readAllBytes(Path.of(argv[1]));
        int inFlight = Integer.parseInt(argv[2]);
        int requests = Integer.parseInt(argv[3]);
        ManagedChannel channel = NettyChannelBuilder.forTarget(argv[0]).usePlaintext().build();
        ArrayBlockingQueue<Object> answers = new ArrayBlockingQueue<>(inFlight + 1);
        StreamObserver<MultiWriteChunksRequest> call = ClientCalls.asyncBidiStreamingCall(
                channel.newCall(METHOD, CallOptions.DEFAULT), new StreamObserver<MultiWriteChunksResponse>() {
                    @Override public void onNext(MultiWriteChunksResponse answer) { answers.add(answer); }
                    @Override public void onError(Throwable error) { answers.add(error); }
                    @Override public void onCompleted() { }
                });
        long[] times = new long[requests];
        ArrayDeque<Long> waiting = new ArrayDeque<>();
        int sent = 0;
        long begun = 0;
        double begunCpu = 0;
        for (int answered = 0; answered < requests; answered++) {
            if (answered == requests / 2) {
                begun = System.nanoTime();
                begunCpu = cpuSeconds();
            }
            while (sent < requests && waiting.size() < inFlight) {
                waiting.add(System.nanoTime());
                call.onNext(request(template, sent++));
            }
            Object answer = answers.take();
            times[answered] = System.nanoTime() - waiting.poll();
            if (!(answer instanceof MultiWriteChunksResponse response) || response.hasError()
                    || response.getStatusesList().stream().anyMatch(status -> status.hasError())) {
                throw new IllegalStateException(answer.toString());
            }
        }
        double seconds = (System.nanoTime() - begun) / 1e9;
        double cpu = cpuSeconds() - begunCpu;
        channel.shutdownNow();
        long[] measured = Arrays.copyOfRange(times, requests / 2, requests);
        Arrays.sort(measured);
        System.out.printf(Locale.ROOT,
                "{\"requests\": %d, \"seconds\": %f, \"cpu_s\": %f, \"p50_ms\": %f, \"p99_ms\": %f}%n",
                measured.length, seconds, cpu, measured[measured.length / 2] / 1e6,
                measured[measured.length * 99 / 100] / 1e6);
    }

    private static double cpuSeconds() {
        return ((OperatingSystemMXBean) ManagementFactory.getOperatingSystemMXBean()).getProcessCpuTime() / 1e9;
    }

    /** A request with the chunk `template`, made the producer's next: docs/format.md. */
    private static MultiWriteChunksRequest request(byte[] template, long sequence) {
        byte[] chunk = template.clone();
        ByteBuffer header = ByteBuffer.wrap(chunk).order(ByteOrder.LITTLE_ENDIAN).putLong(48, sequence);
        CRC32C crc = new CRC32C();
        crc.update(chunk, 0, 84);
        header.putInt(84, (int) crc.getValue());
        ByteString bytes = UnsafeByteOperations.unsafeWrap(chunk);
        return MultiWriteChunksRequest.newBuilder().setRequestId(sequence).setChunkCount(1).setChunks(bytes).build();
    }
}
