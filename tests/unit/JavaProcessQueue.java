import java.io.PrintStream;
import java.util.ArrayList;
import java.util.Arrays;
import java.util.List;
import java.util.stream.Collectors;
import org.apache.rocketmq.client.impl.consumer.ProcessQueue;
import org.apache.rocketmq.common.message.MessageExt;

/**
 * Writes what RocketMQ's own ProcessQueue does as lines of java_process_queue.json. To run it, put rocketmq-client and its dependencies
 * (mvn dependency:copy-dependencies) into jars/:
 *
 *   java -cp 'jars/*' tests/unit/JavaProcessQueue.java > tests/unit/java_process_queue.json
 *
 * A case is [name, [[step, result, undecided], ...]]. A step is a method and its offsets, or its number of messages. The result is null for a
 * method without one, or the offsets of the messages. ``undecided`` is the number of messages that are neither committed nor removed.
 */
public class JavaProcessQueue {
    static final String[][] CASES = {
        {"one batch after another", "put 0 1 2 3 4 5", "take 3", "commit", "put 6 7 8", "take 3", "commit", "take 3", "commit"},
        {"taken batches are committed together", "put 0 1 2 3 4 5", "take 2", "take 2", "commit", "take 2", "commit"},
        {"all taken batches are rolled back", "put 0 1 2 3 4 5", "take 2", "take 2", "rollback", "take 2", "take 2", "take 2", "commit"},
        {"a message again", "put 0 1 2", "take 1", "take 1", "again 1", "take 1", "commit", "take 1", "commit"},
        {"taken with gaps", "put 3 7 9 20", "take 2", "commit", "take 2", "commit"},
        {"removed in order", "put 0 1 2 3", "remove 0", "remove 1 2", "remove 3", "put 4 5", "remove 4", "remove 5"},
        {"removed out of order", "put 0 1 2 3 4 5", "remove 2", "remove 5", "remove 0", "remove 1 3", "remove 4"},
        {"removed far from each other", "put 0 1 2 3 4 5 6 7", "remove 0 3 6", "remove 1 4 7", "remove 2 5"},
        {"removed with gaps", "put 3 7 9", "put 20 21", "remove 7", "remove 3", "remove 20", "remove 9", "remove 21"},
    };

    public static void main(String[] arguments) throws Exception {
        // The client's logger writes to the standard output.
        PrintStream out = System.out;
        System.setOut(System.err);
        List<String> cases = new ArrayList<>();
        for (String[] steps : CASES) {
            ProcessQueue queue = new ProcessQueue();
            List<String> results = new ArrayList<>();
            for (String step : Arrays.copyOfRange(steps, 1, steps.length)) {
                results.add("[\"" + step + "\", " + result(queue, step.split(" ")) + ", " + queue.getMsgCount() + "]");
            }
            cases.add("[\"" + steps[0] + "\", [" + String.join(", ", results) + "]]");
        }
        out.println("[\n" + String.join(",\n", cases) + "\n]");
    }

    static String result(ProcessQueue queue, String[] step) throws Exception {
        List<MessageExt> messages = new ArrayList<>();
        for (String offset : Arrays.copyOfRange(step, 1, step.length)) {
            MessageExt message = new MessageExt();
            message.setQueueOffset(Long.parseLong(offset));
            message.setBody(new byte[1]);
            messages.add(message);
        }
        switch (step[0]) {
            case "put":
                return String.valueOf(queue.putMessage(messages));
            case "take":
                return queue.takeMessages(Integer.parseInt(step[1])).stream().map(MessageExt::getQueueOffset)
                    .collect(Collectors.toList()).toString();
            case "commit":
                return String.valueOf(queue.commit());
            case "rollback":
                queue.rollback();
                return "null";
            case "again":
                queue.makeMessageToConsumeAgain(messages);
                return "null";
            default:
                return String.valueOf(queue.removeMessage(messages));
        }
    }
}
