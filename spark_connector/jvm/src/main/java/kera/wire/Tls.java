package kera.wire;

import java.io.ByteArrayInputStream;
import java.io.IOException;
import java.nio.charset.StandardCharsets;
import java.nio.file.Files;
import java.nio.file.Path;
import java.security.GeneralSecurityException;
import java.security.KeyFactory;
import java.security.KeyStore;
import java.security.PrivateKey;
import java.security.cert.Certificate;
import java.security.cert.CertificateFactory;
import java.security.spec.InvalidKeySpecException;
import java.security.spec.PKCS8EncodedKeySpec;
import java.util.Arrays;
import java.util.Base64;
import java.util.Collection;
import java.util.HashMap;
import java.util.List;
import java.util.Map;
import java.util.regex.Matcher;
import java.util.regex.Pattern;

import javax.net.ssl.KeyManagerFactory;
import javax.net.ssl.SSLContext;
import javax.net.ssl.SSLEngine;
import javax.net.ssl.SSLParameters;
import javax.net.ssl.TrustManagerFactory;

import com.fasterxml.jackson.databind.JsonNode;

/**
 * The certificates of a client, from the settings {@code tls_ca}, {@code tls_cert} and {@code tls_key}: files on the
 * host where the connection is made. Changed files are used from the next connection on.
 *
 * @param ca a file of authorities, or {@code system}
 * @param cert a file with the client's certificate; empty if there is none
 * @param key a file with its key; empty if there is none
 */
record Tls(String ca, String cert, String key) {

    /** The value of {@code ca} that means the authorities that Java knows. */
    private static final String SYSTEM = "system";
    private static final Pattern KEY = Pattern.compile(
            "-----BEGIN PRIVATE KEY-----([A-Za-z0-9+/=\\s]+)-----END PRIVATE KEY-----");
    private static final List<String> ALGORITHMS = List.of("EC", "RSA", "EdDSA");
    private static final char[] NO_PASSWORD = new char[0];

    /** The contents of the files, and the context made of them. */
    private record Loaded(List<byte[]> files, SSLContext context) {
    }

    private static final Map<Tls, Loaded> LOADED = new HashMap<>();

    /** Parse the settings from the service; null if connections are not encrypted. */
    static Tls parse(JsonNode node) {
        if (node == null || node.isNull()) {
            return null;
        }
        return new Tls(node.get("ca").asText(), node.get("cert").asText(), node.get("key").asText());
    }

    /** The client's engine for a connection to {@code host}, which must have a certificate for that name or address. */
    SSLEngine engine(String host, int port) throws IOException {
        SSLEngine engine = context().createSSLEngine(host, port);
        engine.setUseClientMode(true);
        engine.setEnabledProtocols(new String[] {"TLSv1.3", "TLSv1.2"});
        SSLParameters parameters = engine.getSSLParameters();
        parameters.setEndpointIdentificationAlgorithm("HTTPS");
        engine.setSSLParameters(parameters);
        return engine;
    }

    private SSLContext context() throws IOException {
        List<byte[]> files = List.of(read("tls_ca", ca.equals(SYSTEM) ? "" : ca), read("tls_cert", cert),
                read("tls_key", key));
        synchronized (LOADED) {
            Loaded known = LOADED.get(this);
            if (known == null || !same(known.files(), files)) {
                known = new Loaded(files, load(files));
                LOADED.put(this, known);
            }
            return known.context();
        }
    }

    private static boolean same(List<byte[]> one, List<byte[]> other) {
        for (int at = 0; at < one.size(); at++) {
            if (!Arrays.equals(one.get(at), other.get(at))) {
                return false;
            }
        }
        return true;
    }

    private static byte[] read(String setting, String path) throws IOException {
        if (path.isEmpty()) {
            return new byte[0];
        }
        try {
            return Files.readAllBytes(Path.of(path));
        } catch (IOException error) {
            throw new IOException(setting + " " + path + " cannot be read on this host: " + error.getMessage(), error);
        }
    }

    private SSLContext load(List<byte[]> files) throws IOException {
        try {
            TrustManagerFactory trust = TrustManagerFactory.getInstance(TrustManagerFactory.getDefaultAlgorithm());
            trust.init(ca.equals(SYSTEM) ? null : authorities(files.get(0)));
            KeyManagerFactory identity = KeyManagerFactory.getInstance(KeyManagerFactory.getDefaultAlgorithm());
            identity.init(cert.isEmpty() ? null : identity(files.get(1), files.get(2)), NO_PASSWORD);
            SSLContext context = SSLContext.getInstance("TLS");
            context.init(cert.isEmpty() ? null : identity.getKeyManagers(), trust.getTrustManagers(), null);
            return context;
        } catch (GeneralSecurityException | IllegalArgumentException error) {
            throw new IOException("tls_ca " + ca + (cert.isEmpty() ? "" : ", tls_cert " + cert + " and tls_key " + key)
                    + " cannot be used: " + error.getMessage(), error);
        }
    }

    private static KeyStore authorities(byte[] pem) throws GeneralSecurityException, IOException {
        KeyStore store = empty();
        int number = 0;
        for (Certificate each : certificates(pem)) {
            store.setCertificateEntry("ca-" + number++, each);
        }
        if (number == 0) {
            throw new IllegalArgumentException("there are no certificates of authorities in PEM");
        }
        return store;
    }

    private static KeyStore identity(byte[] cert, byte[] key) throws GeneralSecurityException, IOException {
        KeyStore store = empty();
        store.setKeyEntry("key", privateKey(key), NO_PASSWORD, certificates(cert).toArray(new Certificate[0]));
        return store;
    }

    private static KeyStore empty() throws GeneralSecurityException, IOException {
        KeyStore store = KeyStore.getInstance("PKCS12");
        store.load(null, NO_PASSWORD);
        return store;
    }

    private static Collection<? extends Certificate> certificates(byte[] pem) throws GeneralSecurityException {
        return CertificateFactory.getInstance("X.509").generateCertificates(new ByteArrayInputStream(pem));
    }

    private static PrivateKey privateKey(byte[] pem) throws GeneralSecurityException {
        Matcher found = KEY.matcher(new String(pem, StandardCharsets.ISO_8859_1));
        if (!found.find()) {
            throw new IllegalArgumentException("Java takes keys in PKCS#8 only, which begin with BEGIN PRIVATE KEY"
                    + " (openssl pkcs8 -topk8 -nocrypt makes one)");
        }
        PKCS8EncodedKeySpec spec = new PKCS8EncodedKeySpec(Base64.getMimeDecoder().decode(found.group(1)));
        for (String algorithm : ALGORITHMS) {
            try {
                return KeyFactory.getInstance(algorithm).generatePrivate(spec);
            } catch (InvalidKeySpecException error) {
                continue; // the key has another algorithm
            }
        }
        throw new IllegalArgumentException("the key is of no kind that is known here: " + ALGORITHMS);
    }
}
