"""Appends messages to a queue so that each is stored there only once, although a broker does not identify the messages that it receives.

A broker appends whatever it receives. If its answer is lost, the sender does not know whether the messages are stored. RocketMQ's own
producers send them again, which stores them twice. Four parts of this package have to avoid that: the producer (`messages.sender`), the
sink (`sink.queue_writer`), the dead letters (`group.dead_letters`) and the parking lots (`group.parking_lots`). They share one loop
(`once.Appender`) and one view of a queue at its broker (`broker_port.BrokerPort`). Each of them provides the messages that it wants to
have in the queue and a way to recognise them (`once.Outgoing`).

Why each message is stored only once
------------------------------------
1. *Identity.* A message carries a value that no other message has, and that every later attempt computes again. So a reader of the
   queue knows which of the wanted messages are stored.
2. *One appender.* At any time, one appender has one request in flight to the queue. Before it sends, every request that it gave up, and
   every request from other appenders of the same messages, has settled.
3. *Settling.* A request that was given up has settled after three things have happened in this order. First, its connection is closed,
   so that no part of it is still on its way. Second, the broker has answered another request, so it is not paused. Third,
   `Timing.settle` seconds have passed. A broker refuses a request that has waited for 200 ms (``waitTimeMillsInSendQueue``), and readers
   see a stored message some milliseconds after it is stored (``ReputMessageService``). By then, the messages have either been refused or
   can be read. A Proxy may delay a request for longer, so the wait is longer by this delay (`net.behind_proxy.HOLDS_BACK`).
4. *Search.* After that, the appender reads the queue from an offset before which none of the wanted messages can be, up to the queue's
   current end. It sends the messages that it did not find.

If an answer arrives, the messages are stored exactly where it says. If no answer arrives, the messages were either refused, and step 4
sends them, or stored, and step 4 finds them. If an attempt dies, the next attempt has the same two cases. It waits until the lock of the
dead attempt has expired, which takes longer than settling.

Where the search begins, and what excludes a second appender
------------------------------------------------------------
============  =================================  ==================================================  ==============================
used by       identity                           the search begins at                                a second appender is excluded by
============  =================================  ==================================================  ==============================
producer      UNIQ_KEY, new for each call        the queue's end before the first request            new keys, and a lock within the
                                                                                                     process
sink          stamp, and the row's content       one message before the sink's bookmark              the locks of the partition and of
                                                                                                     the run
dead letters  UNIQ_KEY, a hash of the message's  LOOK_BACK letters before the topic's end            the source queue's lock
              place and of the queue's last reset
parking lot   PARKED_FROM, the message's place   the group's offset in the lot; messages before it   the source queue's lock
                                                 have been processed, so parking them again is right
============  =================================  ==================================================  ==============================

What a broker forgets
---------------------
A broker writes offsets, and with them every number in `wire.registers`, to disk every 5 s. A broker that is killed loses the changes of
the last seconds, so a number can go back or disappear, but never increase. Even then, each message is stored only once:

- If a group's offset, or a sink's *bookmark* (`sink.bookmarks`), is too low, the search takes longer. If it is missing, the queue's history
  is read (`sink.lookback`). If it is above the queue's end, it belongs to an earlier topic of that name and is set back.
- If the sink's whole *group*, or its mark in a group that the user named, is missing, the last messages of each queue are searched. Only
  queues in which the sink has none there get a new bookmark. This fails if the sink's messages are followed by more messages of other
  producers than are searched.
- If a sink's *committed batches* are missing, the bookmarks show which batches are committed.
- If the *writer* recorded for a broker is missing or out of date, another run seems to be the writer. In that case, the attempt waits for
  that run's locks and makes its own run the writer again. A broker that was killed has also lost all locks. An attempt trusts its lock
  only on the connection on which it was granted, and through a Proxy only while the broker remembers it (`sink.broker_lock`), so both
  runs request their locks again.
- If the record of a *batch's queues* is missing at a broker, it is assembled from the other brokers' records (`sink.batch_queues`).
- If a queue's last *reset* (`group.offsets`) is forgotten, letters have the keys that they had before it. So letters that were written
  before the reset count as written.

What this does not cover
------------------------
A network may deliver a request later than the time after which it counts as settled. Messages that a broker acknowledged and lost (asynchronous
flush and a power failure) are not sent again. If a task is killed while it writes dead letters or parks messages, the next attempt has
the same lock and may not see the messages of the last request yet. As a result, a message may be parked twice, which counts as once
(`parking`), and a dead letter may be stored twice.
"""
