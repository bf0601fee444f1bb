import java.util.ArrayList;
import java.util.Collections;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Map;
import java.util.Random;
import org.apache.rocketmq.client.consumer.AllocateMessageQueueStrategy;
import org.apache.rocketmq.client.consumer.rebalance.AllocateMessageQueueAveragely;
import org.apache.rocketmq.client.consumer.rebalance.AllocateMessageQueueAveragelyByCircle;
import org.apache.rocketmq.client.consumer.rebalance.AllocateMessageQueueConsistentHash;
import org.apache.rocketmq.common.message.MessageQueue;

/**
 * Writes the allocations of RocketMQ's own strategies as lines of java_allocations.json. The tests do not run this program. To run it,
 * put rocketmq-client and its dependencies (mvn dependency:copy-dependencies) into jars/:
 *
 *   java -Dfile.encoding=UTF-8 -cp 'jars/*' tests/unit/JavaAllocations.java > tests/unit/java_allocations.json
 *
 * A case is [strategy, topic, {broker: number of queues}, [client id, ...], [[position of a queue, ...] for each client and for a
 * stranger]], all in Java's order. If the strategy throws an exception, its name replaces the list of positions.
 */
public class JavaAllocations {
    static final String[] STRATEGIES = {"AVG", "AVG_BY_CIRCLE", "CONSISTENT_HASH"};
    static final String[] BROKERS = {"broker-a", "broker-b", "Broker-10", "a@b1", "a@b2", "b@b1", "c@b@x", "b", "名@前", "\uFF5Ez@q",
        "\uD83D\uDE00@q", "a@b3@", "a@", "@b"};
    static final String[] CLIENTS = {"10.0.0.1@1#7", "10.0.0.10@1#7", "10.0.0.2@DEFAULT", "a", "a-1", "a-10", "B", "", " ", "é", "名前",
        "\uFF5E", "\uD83D\uDE00", "\uD83D\uDE00\uFF5E", "orders:f3b1c0de-0000-4000-8000-000000000001", "orders:f3b1c0de-0000-4000-8000-000000000002"};
    static final Random RANDOM = new Random(20251121);

    public static void main(String[] args) {
        List<String> lines = new ArrayList<>();
        int[] sizes = {0, 1, 3, 8, 9, 17, 40};
        for (String strategy : STRATEGIES) {
            for (int clients = 1; clients <= 9; clients++) {
                for (int size : sizes) {
                    lines.add(line(strategy, brokers(1 + RANDOM.nextInt(3), size), pick(CLIENTS, clients)));
                }
            }
        }
        lines.add(line("AVG", brokers(1, 4), List.of()));
        System.out.println("[\n" + String.join(",\n", lines) + "\n]");
    }

    static List<String> pick(String[] from, int count) {
        List<String> all = new ArrayList<>(List.of(from));
        Collections.shuffle(all, RANDOM);
        List<String> some = all.subList(0, Math.min(count, from.length));
        Collections.sort(some);
        return some;
    }

    static Map<String, Integer> brokers(int count, int size) {
        Map<String, Integer> out = new LinkedHashMap<>();
        for (String broker : pick(BROKERS, count)) {
            out.put(broker, 0);
        }
        List<String> names = new ArrayList<>(out.keySet());
        for (int i = 0; i < size; i++) {
            out.merge(names.get(RANDOM.nextInt(names.size())), 1, Integer::sum);
        }
        return out;
    }

    static AllocateMessageQueueStrategy strategy(String name) {
        switch (name) {
            case "AVG":
                return new AllocateMessageQueueAveragely();
            case "AVG_BY_CIRCLE":
                return new AllocateMessageQueueAveragelyByCircle();
            default:
                return new AllocateMessageQueueConsistentHash();
        }
    }

    static String line(String name, Map<String, Integer> brokers, List<String> clients) {
        String topic = List.of("orders", "%DLQ%billing", "T-1").get(RANDOM.nextInt(3));
        List<MessageQueue> queues = new ArrayList<>();
        brokers.forEach((broker, count) -> {
            for (int id = 0; id < count; id++) {
                queues.add(new MessageQueue(topic, broker, id));
            }
        });
        Collections.sort(queues);
        AllocateMessageQueueStrategy strategy = strategy(name);
        if (!strategy.getName().equals(name)) {
            throw new AssertionError(strategy.getName());
        }
        List<String> owned = new ArrayList<>();
        List<String> asking = new ArrayList<>(clients);
        // The last client is not a member.
        asking.add("stranger");
        for (String client : asking) {
            try {
                List<Integer> positions = new ArrayList<>();
                for (MessageQueue queue : strategy.allocate("billing", client, queues, clients)) {
                    positions.add(queues.indexOf(queue));
                }
                owned.add(positions.toString().replace(" ", ""));
            } catch (RuntimeException error) {
                owned.add(quoted(error.getClass().getSimpleName()));
            }
        }
        List<String> counts = new ArrayList<>();
        brokers.forEach((broker, count) -> counts.add(quoted(broker) + ":" + count));
        List<String> ids = new ArrayList<>();
        clients.forEach(client -> ids.add(quoted(client)));
        return "[" + quoted(name) + "," + quoted(topic) + ",{" + String.join(",", counts) + "},[" + String.join(",", ids) + "],["
            + String.join(",", owned) + "]]";
    }

    static String quoted(String text) {
        StringBuilder out = new StringBuilder("\"");
        for (char c : text.toCharArray()) {
            out.append(c < 128 ? String.valueOf(c) : String.format("\\u%04x", (int) c));
        }
        return out.append('"').toString();
    }
}
