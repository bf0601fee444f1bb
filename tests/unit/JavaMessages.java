import com.alibaba.fastjson.JSON;
import com.alibaba.fastjson.serializer.SerializerFeature;
import java.net.InetAddress;
import java.net.InetSocketAddress;
import java.nio.ByteBuffer;
import java.nio.charset.StandardCharsets;
import java.util.ArrayList;
import java.util.Arrays;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Map;
import java.util.TreeMap;
import org.apache.rocketmq.common.UtilAll;
import org.apache.rocketmq.common.compression.CompressionType;
import org.apache.rocketmq.common.message.Message;
import org.apache.rocketmq.common.message.MessageAccessor;
import org.apache.rocketmq.common.message.MessageClientIDSetter;
import org.apache.rocketmq.common.message.MessageDecoder;
import org.apache.rocketmq.common.message.MessageExt;
import org.apache.rocketmq.common.sysflag.MessageSysFlag;

/**
 * Writes messages that RocketMQ's own classes encode, and the results of decoding, to java_messages.json. The tests do not run this
 * program. To run it, put rocketmq-client and its dependencies (mvn dependency:copy-dependencies) into jars/:
 *
 *   java -Dfile.encoding=UTF-8 -cp 'jars/*' tests/unit/JavaMessages.java > tests/unit/java_messages.json
 *
 * "records": a pull response's bytes in hex, and the messages that a Java consumer gets from it (null if its decoder fails).
 * "properties": texts in hex, and their names and values. "batches": messages, and the body of the request that sends them.
 * "keys": a UNIQ_KEY and its parts. "checksums": bodies in hex, and their CRC. Times are in milliseconds.
 */
public class JavaMessages {
    static final long BORN = 1700000000123L;
    static final long STORED = 1700000000456L;

    public static void main(String[] args) throws Exception {
        Map<String, Object> out = new LinkedHashMap<>();
        out.put("records", records());
        out.put("properties", properties());
        out.put("batches", batches());
        out.put("keys", keys());
        out.put("checksums", checksums());
        List<String> lines = new ArrayList<>();
        for (Map.Entry<String, Object> entry : out.entrySet()) {
            List<String> items = new ArrayList<>();
            for (Object item : (List<?>) entry.getValue()) {
                items.add(JSON.toJSONString(item, SerializerFeature.WriteMapNullValue, SerializerFeature.BrowserCompatible));
            }
            lines.add("\"" + entry.getKey() + "\":[\n" + String.join(",\n", items) + "\n]");
        }
        System.out.println("{\n" + String.join(",\n", lines) + "\n}");
    }

    static String hex(byte[] data) {
        return UtilAll.bytes2string(data).toLowerCase();
    }

    static MessageExt message(String topic, int queue, long offset, byte[] body, int sysFlag, Object... pairs) throws Exception {
        MessageExt message = new MessageExt();
        message.setTopic(topic);
        message.setQueueId(queue);
        message.setQueueOffset(offset);
        message.setBody(body);
        message.setFlag(7);
        message.setCommitLogOffset(1000 + 320 * offset);
        message.setBornTimestamp(BORN + offset);
        message.setStoreTimestamp(STORED + offset);
        message.setReconsumeTimes((int) (offset % 3));
        boolean bornV6 = (sysFlag & MessageSysFlag.BORNHOST_V6_FLAG) != 0;
        boolean storeV6 = (sysFlag & MessageSysFlag.STOREHOSTADDRESS_V6_FLAG) != 0;
        message.setBornHost(new InetSocketAddress(InetAddress.getByName(bornV6 ? "fe80::1:2" : "10.1.2.3"), 51234));
        message.setStoreHost(new InetSocketAddress(InetAddress.getByName(storeV6 ? "2001:db8::ff" : "127.0.0.1"), 10911));
        message.setSysFlag(sysFlag);
        Map<String, String> properties = new LinkedHashMap<>();
        for (int i = 0; i < pairs.length; i += 2) {
            properties.put((String) pairs[i], (String) pairs[i + 1]);
        }
        MessageAccessor.setProperties(message, properties);
        return message;
    }

    /** The record as a broker stores it, with the checksum of the stored body. */
    static byte[] record(MessageExt message) throws Exception {
        byte[] plain = MessageDecoder.encode(message, true);
        int at = 88 + ((message.getSysFlag() & 0x10) != 0 ? 12 : 0) + ((message.getSysFlag() & 0x20) != 0 ? 12 : 0);
        int length = ByteBuffer.wrap(plain).getInt(at - 4);
        message.setBodyCRC(UtilAll.crc32(plain, at, length));
        return MessageDecoder.encode(message, true);
    }

    /** The record with two bytes for the topic's length, as brokers write it if the topic has more than 127 characters. */
    static byte[] second(MessageExt message) throws Exception {
        byte[] topic = message.getTopic().getBytes(StandardCharsets.UTF_8);
        message.setTopic("");
        byte[] first = record(message);
        int at = 88 + message.getBody().length;
        ByteBuffer out = ByteBuffer.allocate(first.length + 1 + topic.length);
        out.put(first, 0, at).putShort((short) topic.length).put(topic).put(first, at + 1, first.length - at - 1);
        out.putInt(0, out.capacity()).putInt(4, MessageDecoder.MESSAGE_MAGIC_CODE_V2);
        return out.array();
    }

    static byte[] join(byte[]... parts) {
        ByteBuffer out = ByteBuffer.allocate(Arrays.stream(parts).mapToInt(part -> part.length).sum());
        for (byte[] part : parts) {
            out.put(part);
        }
        return out.array();
    }

    static Map<String, Object> shown(MessageExt message) {
        Map<String, Object> out = new LinkedHashMap<>();
        out.put("topic", message.getTopic());
        out.put("queue_id", message.getQueueId());
        out.put("queue_offset", message.getQueueOffset());
        out.put("body", message.getBody() == null ? "" : hex(message.getBody()));
        out.put("tags", message.getTags());
        out.put("keys", message.getKeys());
        out.put("sharding_key", message.getProperty("__SHARDINGKEY"));
        out.put("message_id", message.getMsgId());
        out.put("born_timestamp", message.getBornTimestamp());
        out.put("store_timestamp", message.getStoreTimestamp());
        out.put("reconsume_times", message.getReconsumeTimes());
        out.put("properties", message.getProperties() == null ? Map.of() : new TreeMap<>(message.getProperties()));
        return out;
    }

    /** Decodes a response as PullAPIWrapper.processPullResult does. */
    static Map<String, Object> seen(byte[] response) throws Exception {
        List<Object> messages = new ArrayList<>();
        for (MessageExt message : MessageDecoder.decodesBatch(ByteBuffer.wrap(response), true, true, true)) {
            int both = MessageSysFlag.INNER_BATCH_FLAG | MessageSysFlag.NEED_UNWRAP_FLAG;
            if ((message.getSysFlag() & both) == both) {
                List<MessageExt> inner = new ArrayList<>();
                MessageDecoder.decodeMessage(message, inner);
                for (MessageExt one : inner) {
                    // decodeMessage adds this value from the outer message; it is not stored.
                    one.getProperties().remove("WAIT");
                    messages.add(shown(one));
                }
            } else {
                messages.add(shown(message));
            }
        }
        Map<String, Object> out = new LinkedHashMap<>();
        out.put("bytes", hex(response));
        out.put("messages", messages);
        return out;
    }

    static List<Object> records() throws Exception {
        byte[] text = "{\"order\":1}".getBytes(StandardCharsets.UTF_8);
        byte[] large = "0123456789".repeat(60).getBytes(StandardCharsets.UTF_8);
        Object[] usual = {"KEYS", "k1 k2", "UNIQ_KEY", "0A01020304D200000001000000010000", "CLUSTER", "C", "TAGS", "t", "__SHARDINGKEY", "s-1", "a", "b"};
        List<Object> out = new ArrayList<>();
        out.add(seen(record(message("orders", 3, 0, text, 0, usual))));
        out.add(seen(record(message("orders", 3, 1, text, 0))));
        out.add(seen(record(message("orders", 3, 1, new byte[0], 0, usual))));
        out.add(seen(record(message("orders", 3, 2, text, 0, "TAGS", "日本", "KEYS", "é\uD83D\uDE00"))));
        for (int v6 : new int[] {0x10, 0x20, 0x30}) {
            out.add(seen(record(message("orders", 3, 4, text, v6, usual))));
            out.add(seen(record(message("orders", 3, 4, text, v6))));
        }
        for (CompressionType type : CompressionType.values()) {
            int flag = MessageSysFlag.COMPRESSED_FLAG | type.getCompressionFlag();
            out.add(seen(record(message("orders", 3, 5, large, flag, usual))));
            out.add(seen(record(message("orders", 3, 5, large, flag | 0x30, usual))));
        }
        out.add(seen(record(message("orders", 3, 5, large, MessageSysFlag.COMPRESSED_FLAG, usual))));
        out.add(seen(second(message("%RETRY%" + "g".repeat(200), 0, 6, text, 0, usual))));
        out.add(seen(second(message("%RETRY%" + "g".repeat(200), 0, 7, text, 0))));
        int inner = MessageSysFlag.INNER_BATCH_FLAG | MessageSysFlag.NEED_UNWRAP_FLAG;
        byte[] batch = MessageDecoder.encodeMessages(List.of(plain("one", "TAGS", "t1", "UNIQ_KEY", "U1"), plain("two", "UNIQ_KEY", "U2", "KEYS", "k")));
        out.add(seen(record(message("orders", 3, 8, batch, inner, "INNER_NUM", "2"))));
        out.add(seen(record(message("orders", 3, 8, batch, inner | 0x201, "INNER_NUM", "2"))));
        out.add(seen(join(record(message("orders", 3, 9, text, 0, usual)), second(message("orders", 3, 10, text, 0, usual)),
            record(message("orders", 3, 11, text, 0x30, usual)), record(message("orders", 3, 12, large, 0x101, usual)),
            record(message("orders", 3, 13, batch, inner, "INNER_NUM", "2")), record(message("orders", 3, 15, text, 0)))));
        return out;
    }

    static Message plain(String body, String... pairs) {
        Message message = new Message("orders", body.getBytes(StandardCharsets.UTF_8));
        MessageAccessor.setProperties(message, new LinkedHashMap<>());
        for (int i = 0; i < pairs.length; i += 2) {
            MessageAccessor.putProperty(message, pairs[i], pairs[i + 1]);
        }
        return message;
    }

    static List<Object> properties() {
        List<Object> out = new ArrayList<>();
        for (String text : List.of("", "a\1b\2", "a\1b", "a\1b\2c\1d", "a\1b\2c\1d\2", "\2\2a\1b\2", "a\1\2c\1d\2", "\1b\2c\1d\2", "ab\2c\1d\2",
            "a\1b\1c\2", "a\1\1\2", "a\1\1c\2", "a\1b\2a\1c\2", "a\1b\2a\1\2", "\1\1\1\2", "abc\2d\1e", "a\1b\2\1", "a\1 \2", "é\1日\2")) {
            out.add(List.of(hex(text.getBytes(StandardCharsets.UTF_8)), new TreeMap<>(MessageDecoder.string2messageProperties(text))));
        }
        byte[] broken = {'a', 1, 'b', (byte) 0xE6, (byte) 0x97, 2, 'c', (byte) 0xFF, 1, (byte) 0xC3, 2};
        out.add(List.of(hex(broken), new TreeMap<>(MessageDecoder.string2messageProperties(new String(broken, StandardCharsets.UTF_8)))));
        return out;
    }

    static List<Object> batches() {
        List<Object> out = new ArrayList<>();
        String[][][] all = {
            {{"one", "TAGS", "t", "KEYS", "k1 k2", "__SHARDINGKEY", "s", "UNIQ_KEY", "0A01020304D200000001000000010000"}},
            {{"", "UNIQ_KEY", "0A01020304D200000001000000010001"}, {"日本", "a", "b", "UNIQ_KEY", "0A01020304D200000001000000010002"}},
        };
        for (String[][] messages : all) {
            List<Message> made = new ArrayList<>();
            for (String[] one : messages) {
                made.add(plain(one[0], Arrays.copyOfRange(one, 1, one.length)));
            }
            List<Object> given = new ArrayList<>();
            for (Message one : made) {
                Map<String, Object> shown = new LinkedHashMap<>();
                shown.put("body", hex(one.getBody()));
                shown.put("properties", one.getProperties());
                given.add(shown);
            }
            out.add(List.of(given, hex(MessageDecoder.encodeMessages(made))));
        }
        return out;
    }

    static List<Object> keys() {
        List<Object> out = new ArrayList<>();
        for (String key : List.of("0A010203F4D2ABCDEF01000000FF8001", "FE8000000000000000000000000100021234ABCDEF0176543210FFFF")) {
            out.add(List.of(key, hex(MessageClientIDSetter.getIPFromID(key)), MessageClientIDSetter.getPidFromID(key)));
        }
        return out;
    }

    static List<Object> checksums() {
        List<Object> out = new ArrayList<>();
        for (String text : List.of("", "a", "b", "123456789", "orderedmq")) {
            byte[] data = text.getBytes(StandardCharsets.UTF_8);
            out.add(List.of(hex(data), UtilAll.crc32(data)));
        }
        return out;
    }
}
