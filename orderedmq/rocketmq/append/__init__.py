"""Appends messages to a queue so that each is there once, although a broker knows no identity of what it is sent.

A broker appends whatever it receives. If its answer is lost, the sender does not know whether the messages are stored. RocketMQ's own
producers send them again, which stores them twice. Here four users have to avoid that: the producer (`messages.sender`), the sink
(`sink.queue_writer`), the dead letters (`group.dead_letter_topic`) and the parking lots (`group.parking_lots`). They share one loop
(`once.Appender`) and one view of a queue at its broker (`broker_port.BrokerPort`), and each brings the messages it wants to have in the
queue and a way to recognise them (`once.Outgoing`).

Why each message is there once
------------------------------
1. *Identity.* A message carries a value that no other message has, and that every later attempt computes again. So a reader of the
   queue knows which of the wanted messages are there.
2. *One appender.* At any time, one appender has one request in flight to the queue. What it does not wait for, and what other appenders
   of the same messages sent, has been settled.
3. *Settling.* A request that was given up has a known outcome once three things have happened, in this order: its connection is closed,
   so that no part of it is under way any more; the broker has answered another request, so it does not stand still; and SETTLE
   seconds have passed. A broker refuses a request that has waited for 200 ms (``waitTimeMillsInSendQueue``), and readers see a stored
   message some milliseconds after it is stored (``ReputMessageService``). So the messages are refused, or can be read. A Proxy may
   hold a request back for longer, which is added (`net.behind_proxy.HOLDS_BACK`).
4. *Look.* After that, the appender reads the queue from a place before which none of the wanted messages can be, up to the end that
   the queue has then. It sends those that it did not find.

If an answer arrives, the messages are stored exactly where it says. If none arrives, the messages were either refused, and step 4
sends them, or stored, and step 4 finds them. An attempt that dies leaves the same two cases to the next one, which waits until the lock
of the dead one has expired; that takes longer than settling.

How far to look, and what excludes a second appender
----------------------------------------------------
============  =================================  ==================================================  ===============================
user          identity                           the look begins at                                  one appender, because of
============  =================================  ==================================================  ===============================
producer      UNIQ_KEY, new for each call        the queue's end before the first request            the key; a lock in the process
sink          stamp, and the row's content       the sink's bookmark, one message before it          locks of partition and run
dead letters  UNIQ_KEY, a hash of the message's  LOOK_BACK letters before the topic's end            the source queue's lock
              place and of the seek number
parking lot   PARKED_FROM, the message's place   the group's offset in the lot; what is before it    the source queue's lock
                                                 was processed, and may be parked again
============  =================================  ==================================================  ===============================

What a broker forgets
---------------------
A broker writes offsets, and with them all `wire.registers`, to disk every 5 s. One that is killed forgets those of the last seconds, so
a number can become lower or disappear, never higher. Each place where a look begins is safe then:

- A *bookmark* or group's offset that is too low makes the look longer. One that is missing means that nothing is known, and the
  queue's history is read (`sink.lookback`). One above the queue's end belongs to an earlier topic of that name and is set back.
- The *committed batches* of a sink that are missing are known from the bookmarks as well.
- The *writer* of a queue that is missing, or an earlier one, looks like another run's. The attempt then waits for that run's locks and
  makes its own run the writer again. A broker that was killed has forgotten all locks, too; an attempt trusts its lock only on the
  connection on which it was granted, so both runs ask again.
- The *fence*, *reset number* and *seek number* belong to the source's locks and seeks (`group.lock_rules`, `group.offsets`). A seek number
  that is forgotten gives the letters their earlier keys: letters that were written before the seek then count as written.

What this does not cover
------------------------
A network may hold a request back for longer than settling and deliver it then. Messages that a broker acknowledged and lost (asynchronous
flush and a power failure) are not sent again. Delayed messages are not in their queue while they wait, so nothing can look for them
(`messages.delayed`): one whose answer was lost is sent again. A task that is killed while it writes dead letters or parks messages leaves
a request that the next attempt, which has the same lock, may not see yet. A message that is parked twice counts once (`parking.lot`); a
letter may be there twice.
"""
