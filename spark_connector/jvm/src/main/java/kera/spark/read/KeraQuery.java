package kera.spark.read;

import java.util.ArrayList;
import java.util.HashSet;
import java.util.List;
import java.util.Set;

import com.fasterxml.jackson.databind.JsonNode;
import com.fasterxml.jackson.databind.node.ObjectNode;
import kera.spark.service.Service;
import kera.wire.Planner;
import kera.wire.Token;
import org.apache.spark.SparkContext;
import org.apache.spark.sql.SparkSession;
import org.apache.spark.sql.connector.read.InputPartition;
import org.apache.spark.sql.connector.read.PartitionReaderFactory;
import org.apache.spark.sql.types.StructType;
import org.apache.spark.sql.util.CaseInsensitiveStringMap;
import org.apache.spark.status.api.v1.ExecutorSummary;
import org.apache.spark.util.Utils;
import scala.jdk.javaapi.CollectionConverters;

/**
 * What is read, as the planner has to know it.
 *
 * @param options as the user gave them
 * @param columns of the relation: inferred, or those of {@code .schema(...)}; null while they are asked for
 * @param wanted those of them that the query uses
 * @param python what runs the planner
 */
public record KeraQuery(CaseInsensitiveStringMap options, StructType columns, StructType wanted, String python) {
    private static final List<String> WHICH = List.of("path", "subscribe", "subscribepattern", "assign");

    KeraQuery withWanted(StructType fewer) {
        return new KeraQuery(options, columns, fewer, python);
    }

    public Service service() {
        return Service.shared(python);
    }

    /** The parameters of the calls that say what is read. Names are in lower case, as Spark hands them to Python. */
    public ObjectNode params() {
        ObjectNode params = Planner.JSON.createObjectNode();
        options.forEach(params.putObject("options")::put);
        if (columns != null) {
            params.put("schema", columns.json());
        }
        return params;
    }

    /** What the user has said of which streams, in words for a plan. */
    String streams() {
        return WHICH.stream().filter(options::containsKey).map(options::get).findFirst().orElse("");
    }

    PartitionReaderFactory readerFactory() {
        return new KeraReaderFactory(wanted, python);
    }

    /** The pieces that the planner has answered with, each for one task. */
    static InputPartition[] partitions(JsonNode planned) {
        Token token = Token.parse(planned.path("token"));
        Set<String> hosting = executorHosts(SparkSession.active().sparkContext());
        List<InputPartition> partitions = new ArrayList<>();
        for (JsonNode piece : planned.path("pieces")) {
            List<String> hosts = new ArrayList<>();
            piece.path("hosts").forEach(host -> hosts.add(host.asText()));
            if (!hosting.isEmpty()) {
                hosts.retainAll(hosting);
            }
            partitions.add(new KeraInputPartition(piece.toString(), token, hosts.toArray(String[]::new)));
        }
        return partitions.toArray(InputPartition[]::new);
    }

    /**
     * The hosts that have executors; empty: any may come to have some. A task that prefers another one would wait for
     * it all of {@code spark.locality.wait}, as soon as some task of its job finds the host that it prefers.
     */
    private static Set<String> executorHosts(SparkContext spark) {
        Set<String> hosts = new HashSet<>();
        if (spark.getConf().getBoolean("spark.dynamicAllocation.enabled", false)) {
            return hosts;
        }
        for (ExecutorSummary executor : CollectionConverters.asJava(spark.statusStore().executorList(true))) {
            if (!executor.id().equals("driver")) {
                hosts.add(Utils.parseHostPort(executor.hostPort())._1()); // one that is just starting has no port
            }
        }
        return hosts;
    }
}
