// A run, read without Python: Kafka's own client and Avro's own library, by docs/wire.md alone. It prints each event of
// `trajectories` as one line of JSON, its token columns unpacked.
//
//     java -cp 'avro-1.12.0.jar:KAFKA/libs/*' examples/ReadRun.java BOOTSTRAP RUN [PREFIX]      (Java 17, no compilation)

import java.nio.ByteBuffer;
import java.nio.ByteOrder;
import java.time.Duration;
import java.util.ArrayList;
import java.util.HashMap;
import java.util.List;
import java.util.Map;
import java.util.Properties;
import org.apache.avro.Schema;
import org.apache.avro.SchemaNormalization;
import org.apache.avro.generic.GenericData;
import org.apache.avro.generic.GenericDatumReader;
import org.apache.avro.generic.GenericRecord;
import org.apache.avro.io.DecoderFactory;
import org.apache.kafka.clients.consumer.ConsumerRecord;
import org.apache.kafka.clients.consumer.KafkaConsumer;
import org.apache.kafka.common.TopicPartition;
import org.apache.kafka.common.serialization.ByteArrayDeserializer;

public class ReadRun {
    /** The one schema that a reader must have beforehand (docs/wire.md, section 3). */
    static final String SCHEMA_ADDED = """
        {"type": "record", "name": "SchemaAdded", "namespace": "headrace", "fields": [
          {"name": "number", "type": "long"}, {"name": "previous", "type": "bytes"},
          {"name": "writer", "type": "string"}, {"name": "name", "type": "string"},
          {"name": "fingerprint", "type": "bytes"}, {"name": "schema", "type": "string"},
          {"name": "last", "type": "long"}]}""";

    final Map<Long, Schema> schemas = new HashMap<>();
    final Properties kafka = new Properties();

    public static void main(String[] args) throws Exception {
        ReadRun reader = new ReadRun(args[0]);
        String topics = (args.length > 2 ? args[2] : "headrace") + "." + args[1] + ".";
        Schema added = new Schema.Parser().parse(SCHEMA_ADDED);
        reader.schemas.put(SchemaNormalization.parsingFingerprint64(added), added);
        for (ConsumerRecord<byte[], byte[]> record : reader.read(topics + "policy")) {
            GenericRecord event = reader.decode(record.value());
            if (event != null && event.getSchema().getName().equals("SchemaAdded")) {
                long fingerprint = little((ByteBuffer) event.get("fingerprint")).getLong();
                reader.schemas.put(fingerprint, new Schema.Parser().parse(event.get("schema").toString()));
            }
        }
        for (ConsumerRecord<byte[], byte[]> record : reader.read(topics + "trajectories")) {
            GenericRecord event = reader.decode(record.value());
            if (event == null) {
                System.err.println(record.partition() + "@" + record.offset() + ": not a record of this run");
                continue;
            }
            System.out.println("{\"partition\": " + record.partition() + ", \"offset\": " + record.offset()
                + ", \"kind\": \"" + event.getSchema().getName() + "\"" + columns(event) + ", \"event\": " + event + "}");
        }
    }

    ReadRun(String bootstrap) {
        kafka.put("bootstrap.servers", bootstrap);
        kafka.put("isolation.level", "read_committed");
        kafka.put("enable.auto.commit", "false");
        kafka.put("key.deserializer", ByteArrayDeserializer.class.getName());
        kafka.put("value.deserializer", ByteArrayDeserializer.class.getName());
    }

    /** Everything that is committed now; no consumer group is joined. */
    List<ConsumerRecord<byte[], byte[]>> read(String topic) {
        List<ConsumerRecord<byte[], byte[]>> found = new ArrayList<>();
        try (KafkaConsumer<byte[], byte[]> consumer = new KafkaConsumer<>(kafka)) {
            List<TopicPartition> places = consumer.partitionsFor(topic).stream()
                .map(info -> new TopicPartition(topic, info.partition())).toList();
            consumer.assign(places);
            consumer.seekToBeginning(places);
            Map<TopicPartition, Long> ends = consumer.endOffsets(places);
            while (places.stream().anyMatch(place -> consumer.position(place) < ends.get(place))) {
                consumer.poll(Duration.ofMillis(200)).forEach(found::add);
            }
        }
        return found;
    }

    /** Null for bytes that are no record of this run. */
    GenericRecord decode(byte[] value) throws java.io.IOException {
        if (value == null || value.length < 10 || value[0] != (byte) 0xC3 || value[1] != 0x01) {
            return null;
        }
        Schema schema = schemas.get(little(ByteBuffer.wrap(value, 2, 8)).getLong());
        if (schema == null) {
            return null;
        }
        var bytes = DecoderFactory.get().binaryDecoder(value, 10, value.length - 10, null);
        return new GenericDatumReader<GenericRecord>(schema, schema, new GenericData()).read(null, bytes);
    }

    /** Of a span: its token ids, and the log-probabilities of sampled ones. */
    static String columns(GenericRecord event) {
        if (!event.getSchema().getName().equals("Span")) {
            return "";
        }
        int count = ((Number) event.get("count")).intValue();
        String told = ", \"token_ids\": " + ids((ByteBuffer) event.get("tokens"), count);
        if (event.get("logprobs") != null) {
            List<Float> values = new ArrayList<>();
            for (int bits : unshuffled((ByteBuffer) event.get("logprobs"), count)) {
                values.add(Float.intBitsToFloat(bits));
            }
            told += ", \"behaviour_logprobs\": " + values;
        }
        return told;
    }

    static List<Integer> ids(ByteBuffer column, int count) {
        List<Integer> out = new ArrayList<>();
        int width = count == 0 ? 2 : column.remaining() / count;
        if (width == 4) {
            for (int value : unshuffled(column, count)) {
                out.add(value);
            }
            return out;
        }
        ByteBuffer bytes = little(column);
        for (int i = 0; i < count; i++) {
            int low = Short.toUnsignedInt(bytes.getShort(bytes.position() + 2 * i));
            int high = width == 3 ? Byte.toUnsignedInt(bytes.get(bytes.position() + 2 * count + i)) : 0;
            out.add(high << 16 | low);
        }
        return out;
    }

    /** First the lowest byte of every value, then the second of every value, and so on. */
    static int[] unshuffled(ByteBuffer column, int count) {
        int[] out = new int[count];
        for (int part = 0; part < 4; part++) {
            for (int i = 0; i < count; i++) {
                out[i] |= Byte.toUnsignedInt(column.get(column.position() + part * count + i)) << 8 * part;
            }
        }
        return out;
    }

    static ByteBuffer little(ByteBuffer bytes) {
        return bytes.slice().order(ByteOrder.LITTLE_ENDIAN);
    }
}
