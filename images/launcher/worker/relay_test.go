package main

import (
	"errors"
	"net"
	"testing"
	"testing/synctest"
	"time"
)

func TestAnUploadMayTakeLongerThanTheRelayMayBeSilent(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		near, far := net.Pipe()
		defer near.Close()
		connection := &timedConnection{near}
		answer := make(chan error)
		go func() { // as the HTTP client, which awaits the answer from the beginning
			_, err := connection.Read(make([]byte, 1))
			answer <- err
		}()
		go func() {
			for range 10 {
				_, _ = far.Read(make([]byte, 1))
			}
			_, _ = far.Write([]byte("."))
		}()
		for range 10 {
			time.Sleep(idleTimeout / 2)
			if _, err := connection.Write([]byte(".")); err != nil {
				t.Fatal(err)
			}
		}
		if err := <-answer; err != nil {
			t.Errorf("the answer to a long upload was not received: %v", err)
		}
	})
}

func TestARelayThatIsSilentIsLeft(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		near, _ := net.Pipe()
		var late net.Error
		if _, err := (&timedConnection{near}).Read(make([]byte, 1)); !errors.As(err, &late) || !late.Timeout() {
			t.Errorf("got %v", err)
		}
	})
}

func TestALongTransferThatBreaksIsRepeated(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		attempts := 0
		err := newRelay("", 15*time.Minute).repeat(func() error {
			if attempts++; attempts > 1 {
				return nil
			}
			time.Sleep(time.Hour) // a large file, until the launcher was drained
			return errors.New("connection reset")
		})
		if err != nil || attempts != 2 {
			t.Errorf("%d attempts: %v", attempts, err)
		}
	})
}

func TestARelayThatNeverAnswersIsGivenUp(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		began := time.Now()
		err := newRelay("", 15*time.Minute).repeat(func() error {
			time.Sleep(connectTimeout + idleTimeout)
			return errors.New("timeout")
		})
		if took := time.Since(began); err == nil || took > 20*time.Minute {
			t.Errorf("%v after %v", err, took)
		}
	})
}
