import java.util.ArrayList;
import java.util.Collections;
import java.util.HashSet;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Map;
import java.util.Random;
import java.util.Set;
import org.apache.rocketmq.client.consumer.AllocateMessageQueueStrategy;
import org.apache.rocketmq.client.consumer.rebalance.AllocateMachineRoomNearby;
import org.apache.rocketmq.client.consumer.rebalance.AllocateMessageQueueAveragely;
import org.apache.rocketmq.client.consumer.rebalance.AllocateMessageQueueAveragelyByCircle;
import org.apache.rocketmq.client.consumer.rebalance.AllocateMessageQueueByConfig;
import org.apache.rocketmq.client.consumer.rebalance.AllocateMessageQueueByMachineRoom;
import org.apache.rocketmq.client.consumer.rebalance.AllocateMessageQueueConsistentHash;
import org.apache.rocketmq.common.message.MessageQueue;

/**
 * Writes the allocations of RocketMQ's own strategies as lines of java_allocations.json. The tests do not run this program. To run it,
 * put rocketmq-client and its dependencies (mvn dependency:copy-dependencies) into jars/:
 *
 *   java -Dfile.encoding=UTF-8 -cp 'jars/*' tests/unit/JavaAllocations.java > tests/unit/java_allocations.json
 *
 * A case is [strategy, its parameter, topic, {broker: number of queues}, {client id: room}, [[position of a queue, ...] for each
 * client and for a stranger]], all in Java's order. The parameter is the list of rooms for MACHINE_ROOM, and the positions for CONFIG.
 * If the strategy throws an exception, its name replaces the list of positions.
 */
public class JavaAllocations {
    static final String[] INNER = {"AVG", "AVG_BY_CIRCLE", "CONSISTENT_HASH"};
    static final String[] BROKERS = {"broker-a", "broker-b", "Broker-10", "a@b1", "a@b2", "b@b1", "c@b@x", "b", "名@前", "\uFF5Ez@q",
        "\uD83D\uDE00@q", "a@b3@", "a@", "@b"};
    static final String[] ROOMS = {"a", "b", "c", "名", "\uFF5Ez", "\uD83D\uDE00", "broker-b", "d"};
    static final String[] CLIENTS = {"10.0.0.1@1#7", "10.0.0.10@1#7", "10.0.0.2@DEFAULT", "a", "a-1", "a-10", "B", "", " ", "é", "名前",
        "\uFF5E", "\uD83D\uDE00", "\uD83D\uDE00\uFF5E", "orders:f3b1c0de-0000-4000-8000-000000000001", "orders:f3b1c0de-0000-4000-8000-000000000002"};
    static final Random RANDOM = new Random(20251121);

    public static void main(String[] args) {
        List<String> lines = new ArrayList<>();
        int[] sizes = {0, 1, 3, 8, 9, 17, 40};
        for (String strategy : INNER) {
            for (int clients = 1; clients <= 9; clients++) {
                for (int size : sizes) {
                    lines.add(line(strategy, Set.of(), brokers(1 + RANDOM.nextInt(3), size, 12), members(clients, 0)));
                }
            }
        }
        for (int i = 0; i < 9; i++) {
            lines.add(line("CONFIG", Set.of(), brokers(2, 4 + i, 12), members(1 + i, 0)));
        }
        for (int i = 0; i < 63; i++) {
            Set<String> rooms = new HashSet<>(pick(ROOMS, RANDOM.nextInt(5), ROOMS.length));
            if (RANDOM.nextInt(8) == 0) {
                rooms.add("");
            }
            lines.add(line("MACHINE_ROOM", rooms, brokers(1 + RANDOM.nextInt(6), RANDOM.nextInt(41), 14), members(1 + i % 9, 0)));
        }
        for (int i = 0; i < 135; i++) {
            // The last broker has no room, and a member may have no room. Both are errors.
            int known = i % 12 == 0 ? 14 : 13;
            lines.add(line("MACHINE_ROOM_NEARBY-" + INNER[i % 3], Set.of(), brokers(1 + RANDOM.nextInt(6), RANDOM.nextInt(41), known),
                members(1 + i % 9, i % 20 == 0 ? 2 : 1)));
        }
        lines.add(line("AVG", Set.of(), brokers(1, 4, 12), Map.of()));
        System.out.println("[\n" + String.join(",\n", lines) + "\n]");
    }

    static List<String> pick(String[] from, int count, int known) {
        List<String> all = new ArrayList<>(List.of(from).subList(0, known));
        Collections.shuffle(all, RANDOM);
        List<String> some = all.subList(0, Math.min(count, known));
        Collections.sort(some);
        return some;
    }

    static Map<String, Integer> brokers(int count, int size, int known) {
        Map<String, Integer> out = new LinkedHashMap<>();
        for (String broker : pick(BROKERS, count, known)) {
            out.put(broker, 0);
        }
        List<String> names = new ArrayList<>(out.keySet());
        for (int i = 0; i < size; i++) {
            out.merge(names.get(RANDOM.nextInt(names.size())), 1, Integer::sum);
        }
        return out;
    }

    /** Rooms: 0 no member has one, 1 every member has one, 2 one member has none. */
    static Map<String, String> members(int count, int rooms) {
        Map<String, String> out = new LinkedHashMap<>();
        int around = 1 + RANDOM.nextInt(ROOMS.length);
        for (String client : pick(CLIENTS, count, CLIENTS.length)) {
            out.put(client, rooms == 0 ? null : ROOMS[RANDOM.nextInt(around)]);
        }
        if (rooms == 2) {
            out.put(out.keySet().iterator().next(), RANDOM.nextBoolean() ? null : "");
        }
        return out;
    }

    static AllocateMessageQueueStrategy strategy(String name, Set<String> rooms, List<MessageQueue> queues, Map<String, String> members) {
        switch (name) {
            case "CONFIG":
                AllocateMessageQueueByConfig byConfig = new AllocateMessageQueueByConfig();
                byConfig.setMessageQueueList(queues);
                return byConfig;
            case "AVG":
                return new AllocateMessageQueueAveragely();
            case "AVG_BY_CIRCLE":
                return new AllocateMessageQueueAveragelyByCircle();
            case "CONSISTENT_HASH":
                return new AllocateMessageQueueConsistentHash();
            case "MACHINE_ROOM":
                AllocateMessageQueueByMachineRoom byRoom = new AllocateMessageQueueByMachineRoom();
                byRoom.setConsumeridcs(rooms);
                return byRoom;
            default:
                String inner = name.substring(name.indexOf('-') + 1);
                return new AllocateMachineRoomNearby(strategy(inner, rooms, queues, members), new AllocateMachineRoomNearby.MachineRoomResolver() {
                    @Override
                    public String brokerDeployIn(MessageQueue queue) {
                        int at = queue.getBrokerName().indexOf('@');
                        return at < 0 ? queue.getBrokerName() : queue.getBrokerName().substring(0, at);
                    }

                    @Override
                    public String consumerDeployIn(String client) {
                        return members.get(client);
                    }
                });
        }
    }

    static String line(String name, Set<String> rooms, Map<String, Integer> brokers, Map<String, String> members) {
        String topic = List.of("orders", "%DLQ%billing", "T-1").get(RANDOM.nextInt(3));
        List<MessageQueue> queues = new ArrayList<>();
        brokers.forEach((broker, count) -> {
            for (int id = 0; id < count; id++) {
                queues.add(new MessageQueue(topic, broker, id));
            }
        });
        Collections.shuffle(queues, RANDOM);
        Collections.sort(queues);
        List<String> clients = new ArrayList<>(members.keySet());
        Collections.shuffle(clients, RANDOM);
        Collections.sort(clients);
        List<MessageQueue> configured = new ArrayList<>(queues);
        Collections.shuffle(configured, RANDOM);
        configured = configured.subList(0, configured.size() / 2);
        AllocateMessageQueueStrategy strategy = strategy(name, rooms, configured, members);
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
        clients.forEach(client -> ids.add(quoted(client) + ":" + quoted(members.get(client))));
        List<String> sorted = new ArrayList<>(rooms);
        Collections.sort(sorted);
        List<String> named = new ArrayList<>();
        sorted.forEach(room -> named.add(quoted(room)));
        if (name.equals("CONFIG")) {
            configured.forEach(queue -> named.add(String.valueOf(queues.indexOf(queue))));
        }
        return "[" + quoted(name) + ",[" + String.join(",", named) + "]," + quoted(topic) + ",{" + String.join(",", counts) + "},{"
            + String.join(",", ids) + "},[" + String.join(",", owned) + "]]";
    }

    static String quoted(String text) {
        if (text == null) {
            return "null";
        }
        StringBuilder out = new StringBuilder("\"");
        for (char c : text.toCharArray()) {
            out.append(c < 128 ? String.valueOf(c) : String.format("\\u%04x", (int) c));
        }
        return out.append('"').toString();
    }
}
