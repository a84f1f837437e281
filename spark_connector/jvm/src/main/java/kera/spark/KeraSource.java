package kera.spark;

import java.util.HashMap;
import java.util.Locale;
import java.util.Map;
import java.util.Optional;
import java.util.Set;
import java.util.concurrent.ConcurrentHashMap;

import com.fasterxml.jackson.databind.JsonNode;
import kera.spark.read.KeraQuery;
import kera.spark.service.Environment;
import kera.spark.service.KeraAnalysisException;
import kera.spark.service.Service;
import kera.wire.KeraException;
import org.apache.spark.sql.SparkSession;
import org.apache.spark.sql.connector.catalog.Table;
import org.apache.spark.sql.connector.catalog.TableProvider;
import org.apache.spark.sql.connector.expressions.Transform;
import org.apache.spark.sql.execution.datasources.DataSourceManager;
import org.apache.spark.sql.execution.datasources.v2.python.PythonDataSourceV2;
import org.apache.spark.sql.sources.DataSourceRegister;
import org.apache.spark.sql.types.DataType;
import org.apache.spark.sql.types.StructType;
import org.apache.spark.sql.util.CaseInsensitiveStringMap;
import org.slf4j.Logger;
import org.slf4j.LoggerFactory;

/**
 * What {@code format("kera")} means where the jar is loaded: the columnar engine, or the Python data source.
 *
 * <p>Lists of metadata and {@code engine=python} are the Python data source's, as without the jar, and so are writes
 * unless {@code engine=columnar}. Spark makes one KeraSource per DataFrame. Whether a table is to be read or written it
 * does not say, so the engine is chosen when columns are asked for, or a scan or a write is built.
 */
public final class KeraSource implements TableProvider, DataSourceRegister {
    static final String NAME = "kera";

    /** The name of the Python data source where it was registered by hand: Spark refuses one that a jar has. */
    private static final String REGISTERED_NAME = "kera_python";
    private static final String ENGINE = "engine";
    private static final String PYTHON = "python";
    private static final String AUTO = "auto";
    private static final String COLUMNAR = "columnar";

    /** What {@code auto} means when a stream is written to: {@code columnar} where that can be, or {@code python}. */
    private static final String AUTO_WRITES = "spark.kera.autoWrites";
    private static final String AUTO_WRITES_DEFAULT = PYTHON;

    private static final Logger LOG = LoggerFactory.getLogger(KeraSource.class);
    /** The Pythons whose lack of something was said; with {@code auto} they are not tried again. */
    private static final Set<String> LACKING = ConcurrentHashMap.newKeySet();

    private PythonDataSourceV2 pythonSource;
    /** Its name, once it is there. */
    private String pythonName;

    @Override
    public String shortName() {
        return NAME;
    }

    @Override
    public boolean supportsExternalMetadata() {
        return true;
    }

    @Override
    public StructType inferSchema(CaseInsensitiveStringMap options) {
        if (!isColumnar(options)) {
            return pythonSource().inferSchema(forPython(options));
        }
        KeraQuery query = new KeraQuery(options, null, null, Service.driverPython());
        JsonNode found = KeraAnalysisException.translating(() -> query.service().call("schema", query.params()));
        return (StructType) DataType.fromJson(found.path("schema").asText());
    }

    @Override
    public Table getTable(StructType schema, Transform[] partitioning, Map<String, String> properties) {
        PythonDataSourceV2 source = pythonSource();
        KeraPythonTable python = new KeraPythonTable(source, pythonName, schema);
        return mayBeColumnar(new CaseInsensitiveStringMap(properties)) ? new KeraTable(schema, python) : python;
    }

    /** Spark's source of Python data sources, which finds the one called {@code kera}. It keeps what Python says. */
    private PythonDataSourceV2 pythonSource() {
        if (pythonSource == null) {
            DataSourceManager known = SparkSession.active().sessionState().dataSourceManager();
            boolean byHand = !known.dataSourceExists(NAME) && known.dataSourceExists(REGISTERED_NAME);
            pythonName = byHand ? REGISTERED_NAME : NAME;
            pythonSource = new PythonDataSourceV2();
            pythonSource.setShortName(pythonName);
        }
        return pythonSource;
    }

    /**
     * Whether the columnar engine is to read. With {@code auto} it is where nothing is missing here; otherwise Python
     * reads, and a warning says so once. With {@code columnar} what is missing is an error.
     */
    static boolean isColumnar(CaseInsensitiveStringMap options) {
        if (!mayBeColumnar(options)) {
            return false;
        }
        String python = Service.driverPython();
        boolean required = engine(options).equals(COLUMNAR);
        if (!required && LACKING.contains(python)) {
            return false;
        }
        Optional<String> missing;
        boolean passing = false;
        try {
            missing = Environment.missing(python);
        } catch (KeraException slow) {
            missing = Optional.of(slow.getMessage());
            passing = true;
        }
        if (missing.isEmpty()) {
            return true;
        }
        if (required) {
            String message = "option engine: the columnar engine cannot run here; " + missing.get()
                    + ". Or leave the option out, so that Python workers read";
            KeraAnalysisException.translating(() -> {
                throw new KeraException("InvalidArgument", message, false);
            });
        }
        if (passing || LACKING.add(python)) {
            LOG.warn("Python workers read the streams of KerA, because the columnar engine cannot run here; {}."
                    + " Option engine=python says that this is meant", missing.get());
        }
        return false;
    }

    /** Whether the columnar engine is to write, if it can: where it is asked for, or {@code auto} means it. */
    static boolean isColumnarWrite(CaseInsensitiveStringMap options) {
        String engine = engine(options);
        if (engine.equals(AUTO)) {
            String writes = SparkSession.active().conf().get(AUTO_WRITES, AUTO_WRITES_DEFAULT);
            engine = writes.strip().toLowerCase(Locale.ROOT);
        }
        return engine.equals(COLUMNAR) && isColumnar(options);
    }

    /** Whether nothing but the columnar engine will do. */
    static boolean requiresColumnar(CaseInsensitiveStringMap options) {
        return engine(options).equals(COLUMNAR);
    }

    /** Whether the options leave it to the environment: what they say wrongly, Python refuses with its own words. */
    private static boolean mayBeColumnar(CaseInsensitiveStringMap options) {
        String engine = engine(options);
        return !options.containsKey("metadata") && !wholeChunks(options)
                && (engine.equals(AUTO) || engine.equals(COLUMNAR));
    }

    /** Whether chunks of typed streams are wanted as they are, which is for Python to do. */
    private static boolean wholeChunks(CaseInsensitiveStringMap options) {
        return options.getOrDefault("onSchemaMismatch", "").strip().equalsIgnoreCase("bytes");
    }

    private static String engine(CaseInsensitiveStringMap options) {
        return options.getOrDefault(ENGINE, AUTO).strip().toLowerCase(Locale.ROOT);
    }

    /** The options with which Python reads: those that say that it is meant to, so that it does not ask for the jar. */
    static CaseInsensitiveStringMap forPython(CaseInsensitiveStringMap options) {
        String engine = engine(options);
        if (!engine.equals(AUTO) && (!engine.equals(COLUMNAR) || wholeChunks(options))) {
            return options; // what does not go together, Python refuses
        }
        Map<String, String> changed = new HashMap<>(options);
        changed.put(ENGINE, PYTHON);
        return new CaseInsensitiveStringMap(changed);
    }
}
