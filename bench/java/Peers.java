import java.io.BufferedReader;
import java.io.InputStreamReader;
import java.util.ArrayList;
import java.util.List;
import java.util.concurrent.CountDownLatch;
import java.util.concurrent.atomic.AtomicLong;
import org.apache.rocketmq.client.consumer.DefaultLitePullConsumer;
import org.apache.rocketmq.client.consumer.DefaultMQPushConsumer;
import org.apache.rocketmq.client.consumer.listener.ConsumeOrderlyStatus;
import org.apache.rocketmq.client.consumer.listener.MessageListenerOrderly;
import org.apache.rocketmq.client.exception.MQBrokerException;
import org.apache.rocketmq.client.producer.DefaultMQProducer;
import org.apache.rocketmq.client.producer.selector.SelectMessageQueueByHash;
import org.apache.rocketmq.common.consumer.ConsumeFromWhere;
import org.apache.rocketmq.common.message.Message;
import org.apache.rocketmq.common.message.MessageAccessor;
import org.apache.rocketmq.common.message.MessageConst;
import org.apache.rocketmq.common.message.MessageExt;
import org.apache.rocketmq.common.message.MessageQueue;

/**
 * Measures RocketMQ's own client, used as applications use it. For each line of standard input, "WAY TOPIC COUNT BATCH", it prints a line with the
 * seconds that COUNT messages took, counted from the first message (because a consumer's start also takes seconds).
 */
public class Peers {
    private static final int BODY = 100;
    private static final int BATCH = 1000;
    /** RemotingSysResponseCode.SYSTEM_BUSY. */
    private static final int BUSY = 2;
    private static String namesrv;
    private static int number = 0;

    public static void main(String[] arguments) {
        try {
            serve(arguments[0]);
            // Threads of the client may linger.
            System.exit(0);
        } catch (Exception error) {
            error.printStackTrace();
            System.exit(1);
        }
    }

    private static void serve(String address) throws Exception {
        namesrv = address;
        BufferedReader lines = new BufferedReader(new InputStreamReader(System.in));
        for (String line = lines.readLine(); line != null; line = lines.readLine()) {
            String[] words = line.split(" ");
            String topic = words[1];
            int count = Integer.parseInt(words[2]);
            int batch = Integer.parseInt(words[3]);
            double seconds;
            switch (words[0]) {
                case "pull": seconds = pull(topic, count, batch); break;
                case "push": seconds = push(topic, count, batch); break;
                case "batch": seconds = batch(topic, count, 4); break;
                case "ordered": seconds = ordered(topic, count, 8); break;
                default: throw new IllegalArgumentException(words[0]);
            }
            System.out.println(seconds);
            System.out.flush();
        }
    }

    private static double since(long begin) {
        return (System.nanoTime() - begin) / 1e9;
    }

    /** Messages of a queue that a consumer may hold: the default of 1000, or ten pulls, so that it does not wait if a pull is large. */
    private static int cached(int batch) {
        return Math.max(1000, 10 * batch);
    }

    private static double pull(String topic, int count, int batch) throws Exception {
        DefaultLitePullConsumer consumer = new DefaultLitePullConsumer("bench-java-pull-" + number++);
        consumer.setNamesrvAddr(namesrv);
        consumer.setPullBatchSize(batch);
        consumer.setPullThresholdForQueue(cached(batch));
        consumer.setPullThresholdForAll(10L * cached(batch));
        consumer.setAutoCommit(false);
        consumer.start();
        try {
            List<MessageQueue> queues = new ArrayList<>(consumer.fetchMessageQueues(topic));
            consumer.assign(queues);
            for (MessageQueue queue : queues) {
                consumer.seekToBegin(queue);
            }
            long begin = 0;
            int seen = 0;
            int empty = 0;
            while (seen < count) {
                int found = consumer.poll(1000).size();
                if (begin == 0 && found > 0) {
                    begin = System.nanoTime();
                }
                seen += found;
                empty = found > 0 ? 0 : empty + 1;
                if (empty > 20) {
                    throw new IllegalStateException(seen + " of " + count + " messages, and no more come");
                }
            }
            return since(begin);
        } finally {
            consumer.shutdown();
        }
    }

    private static double push(String topic, int count, int batch) throws Exception {
        DefaultMQPushConsumer consumer = new DefaultMQPushConsumer("bench-java-push-" + number++);
        consumer.setNamesrvAddr(namesrv);
        consumer.setConsumeFromWhere(ConsumeFromWhere.CONSUME_FROM_FIRST_OFFSET);
        consumer.setPullBatchSize(batch);
        consumer.setPullThresholdForQueue(cached(batch));
        consumer.setConsumeMessageBatchMaxSize(batch);
        consumer.subscribe(topic, "*");
        AtomicLong begin = new AtomicLong();
        AtomicLong seen = new AtomicLong();
        CountDownLatch done = new CountDownLatch(1);
        consumer.registerMessageListener((MessageListenerOrderly) (messages, context) -> {
            begin.compareAndSet(0, System.nanoTime());
            if (seen.addAndGet(messages.size()) >= count) {
                done.countDown();
            }
            return ConsumeOrderlyStatus.SUCCESS;
        });
        consumer.start();
        try {
            done.await();
            return since(begin.get());
        } finally {
            consumer.shutdown();
        }
    }

    private static Message message(String topic, int at) {
        Message message = new Message(topic, "created", "key-" + at, new byte[BODY]);
        MessageAccessor.putProperty(message, MessageConst.PROPERTY_SHARDING_KEY, "account-" + at % 1000);
        return message;
    }

    private interface Part {
        void send(DefaultMQProducer producer, int thread) throws Exception;
    }

    private static double sent(int threads, Part part) throws Exception {
        DefaultMQProducer producer = new DefaultMQProducer("bench-java-producer-" + number++);
        producer.setNamesrvAddr(namesrv);
        producer.setSendMsgTimeout(30000);
        producer.start();
        try {
            List<Thread> running = new ArrayList<>();
            List<Exception> failed = new ArrayList<>();
            long begin = System.nanoTime();
            for (int thread = 0; thread < threads; thread++) {
                int own = thread;
                running.add(new Thread(() -> {
                    try {
                        part.send(producer, own);
                    } catch (Exception error) {
                        synchronized (failed) {
                            failed.add(error);
                        }
                    }
                }));
                running.get(thread).start();
            }
            for (Thread thread : running) {
                thread.join();
            }
            if (!failed.isEmpty()) {
                throw failed.get(0);
            }
            return since(begin);
        } finally {
            producer.shutdown();
        }
    }

    private static double batch(String topic, int count, int threads) throws Exception {
        return sent(threads, (producer, thread) -> {
            MessageQueue queue = producer.fetchPublishMessageQueues(topic).get(thread);
            for (int at = 0; at < count / threads; at += BATCH) {
                List<Message> messages = new ArrayList<>(BATCH);
                for (int each = at; each < Math.min(at + BATCH, count / threads); each++) {
                    messages.add(message(topic, each));
                }
                patiently(() -> producer.send(messages, queue));
            }
        });
    }

    private interface Send {
        void run() throws Exception;
    }

    /** Sends again if the broker answers that it is busy. */
    private static void patiently(Send send) throws Exception {
        while (true) {
            try {
                send.run();
                return;
            } catch (MQBrokerException error) {
                if (error.getResponseCode() != BUSY) {
                    throw error;
                }
                Thread.sleep(20);
            }
        }
    }

    private static double ordered(String topic, int count, int threads) throws Exception {
        SelectMessageQueueByHash selector = new SelectMessageQueueByHash();
        return sent(threads, (producer, thread) -> {
            for (int at = 0; at < count / threads; at++) {
                Message message = message(topic, at);
                String key = "account-" + at % 1000;
                patiently(() -> producer.send(message, selector, key));
            }
        });
    }
}
