CREATE MATERIALIZED VIEW revenue AS
SELECT event, count(*) AS orders, sum(total) AS total FROM events GROUP BY event;
