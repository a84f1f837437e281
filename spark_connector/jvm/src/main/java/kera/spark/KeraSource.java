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
 * The provider of {@code format("kera")} when the jar is loaded: the columnar engine, or the Python data source.
 *
 * <p>The Python data source handles metadata listings and {@code engine=python}, as without the jar. It also handles
 * writes, unless the engine is {@code columnar}. Spark makes one KeraSource per DataFrame, and does not say whether the
 * table will be read or written. So the engine is chosen when Spark asks for columns, or builds a scan or a write.
 */
public final class KeraSource implements TableProvider, DataSourceRegister {
    static final String NAME = "kera";

    /** The name of a Python data source that was registered by hand: Spark refuses a name that a jar provides. */
    private static final String REGISTERED_NAME = "kera_python";
    private static final String ENGINE = "engine";
    private static final String PYTHON = "python";
    private static final String AUTO = "auto";
    private static final String COLUMNAR = "columnar";

    /** Setting of the engine that {@code auto} writes with: {@code columnar}, where it can run, or {@code python}. */
    private static final String AUTO_WRITES = "spark.kera.autoWrites";
    private static final String AUTO_WRITES_DEFAULT = PYTHON;

    private static final Logger LOG = LoggerFactory.getLogger(KeraSource.class);
    /** The Pythons for which a warning has named a missing requirement; {@code auto} does not try them again. */
    private static final Set<String> LACKING = ConcurrentHashMap.newKeySet();

    private PythonDataSourceV2 pythonSource;
    /** The name of {@link #pythonSource}, once that exists. */
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

    /** Spark's wrapper of the Python data source called {@code kera}. It caches what Python answers. */
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
     * Whether the columnar engine reads. With {@code auto} it does if nothing is missing here; otherwise Python reads,
     * and a warning is logged once. With {@code columnar} a missing requirement is an error.
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

    /** Whether the columnar engine writes: if the user asks for it, or {@code auto} means it and it can run here. */
    static boolean isColumnarWrite(CaseInsensitiveStringMap options) {
        String engine = engine(options);
        if (engine.equals(AUTO)) {
            String writes = SparkSession.active().conf().get(AUTO_WRITES, AUTO_WRITES_DEFAULT);
            engine = writes.strip().toLowerCase(Locale.ROOT);
        }
        return engine.equals(COLUMNAR) && isColumnar(options);
    }

    /** Whether the user requires the columnar engine. */
    static boolean requiresColumnar(CaseInsensitiveStringMap options) {
        return engine(options).equals(COLUMNAR);
    }

    /** Whether the options allow the columnar engine. Python refuses invalid options, with its own text. */
    private static boolean mayBeColumnar(CaseInsensitiveStringMap options) {
        String engine = engine(options);
        return !options.containsKey("metadata") && !wholeChunks(options)
                && (engine.equals(AUTO) || engine.equals(COLUMNAR));
    }

    /** Whether the user wants chunks of typed streams as raw bytes, which only Python can read. */
    private static boolean wholeChunks(CaseInsensitiveStringMap options) {
        return options.getOrDefault("onSchemaMismatch", "").strip().equalsIgnoreCase("bytes");
    }

    private static String engine(CaseInsensitiveStringMap options) {
        return options.getOrDefault(ENGINE, AUTO).strip().toLowerCase(Locale.ROOT);
    }

    /** The options with which Python reads: they say that Python is meant, so that it does not ask for the jar. */
    static CaseInsensitiveStringMap forPython(CaseInsensitiveStringMap options) {
        String engine = engine(options);
        if (!engine.equals(AUTO) && (!engine.equals(COLUMNAR) || wholeChunks(options))) {
            return options; // Python refuses options that contradict each other
        }
        Map<String, String> changed = new HashMap<>(options);
        changed.put(ENGINE, PYTHON);
        return new CaseInsensitiveStringMap(changed);
    }
}
