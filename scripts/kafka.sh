#!/bin/sh
# Fetch a Kafka into build/kafka, which the tests of kera connect start for themselves, with MirrorMaker 2 beside it.
#
# Its jars come from Maven Central, by mvn: 60 MB, once. When that is not possible, says in one line on stderr why, and
# exits with 1; tests that need Kafka are skipped then, with that reason.
set -eu

version=4.3.1
libs=build/kafka/$version

fail() {
    echo "kafka: $*" >&2
    exit 1
}

[ -e "$libs/.complete" ] && exit
command -v mvn >/dev/null 2>&1 || fail "mvn is missing, which fetches it: install maven"
JAVA_HOME="$(sh scripts/java.sh)" || exit 1
export JAVA_HOME

mkdir -p "$libs"
pom=build/kafka/pom.xml
cat >"$pom" <<END
<project xmlns="http://maven.apache.org/POM/4.0.0">
  <modelVersion>4.0.0</modelVersion>
  <groupId>kera</groupId><artifactId>kafka</artifactId><version>1</version><packaging>pom</packaging>
  <dependencies>
    <dependency>
      <groupId>org.apache.kafka</groupId><artifactId>kafka_2.13</artifactId><version>$version</version>
    </dependency>
    <dependency>
      <groupId>org.apache.kafka</groupId><artifactId>connect-mirror</artifactId><version>$version</version>
    </dependency>
  </dependencies>
</project>
END
echo "kafka: fetching Kafka $version, which tests need" >&2
mvn -q -B -f "$pom" dependency:copy-dependencies -DoutputDirectory="$(pwd)/$libs" >&2 ||
    fail "Maven Central cannot be reached, or has no Kafka $version"
touch "$libs/.complete"
