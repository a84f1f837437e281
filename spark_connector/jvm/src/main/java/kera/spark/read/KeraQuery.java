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
 * A read, as the planner has to know it.
 *
 * @param options the options as the user gave them
 * @param columns the columns of the relation: inferred, or from {@code .schema(...)}; null while they are inferred
 * @param wanted the columns that the query uses
 * @param python the Python that runs the planner
 */
public record KeraQuery(CaseInsensitiveStringMap options, StructType columns, StructType wanted, String python) {
    private static final List<String> WHICH = List.of("path", "subscribe", "subscribepattern", "assign");

    KeraQuery withWanted(StructType fewer) {
        return new KeraQuery(options, columns, fewer, python);
    }

    public Service service() {
        return Service.shared(python);
    }

    /** The parameters of calls that describe the read. Names are in lower case, as Spark passes them to Python. */
    public ObjectNode params() {
        ObjectNode params = Planner.JSON.createObjectNode();
        options.forEach(params.putObject("options")::put);
        if (columns != null) {
            params.put("schema", columns.json());
        }
        return params;
    }

    /** The streams as the user named them, to be shown in a plan. */
    String streams() {
        return WHICH.stream().filter(options::containsKey).map(options::get).findFirst().orElse("");
    }

    PartitionReaderFactory readerFactory() {
        return new KeraReaderFactory(wanted, python);
    }

    /** The pieces in the planner's answer, each for one task. */
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
     * The hosts that have executors; empty if executors may be added on any host. A task that prefers a host without
     * executors would wait for all of {@code spark.locality.wait}, once any task of its job gets the host it prefers.
     */
    private static Set<String> executorHosts(SparkContext spark) {
        Set<String> hosts = new HashSet<>();
        if (spark.getConf().getBoolean("spark.dynamicAllocation.enabled", false)) {
            return hosts;
        }
        for (ExecutorSummary executor : CollectionConverters.asJava(spark.statusStore().executorList(true))) {
            if (!executor.id().equals("driver")) {
                hosts.add(Utils.parseHostPort(executor.hostPort())._1()); // a starting executor has no port yet
            }
        }
        return hosts;
    }
}
